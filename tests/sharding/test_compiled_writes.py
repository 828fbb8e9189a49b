"""Compiled code outside of a forward reads and writes sharded parameters, as eager code does."""

import pytest
import torch
from support.models import (
    INDUCTOR_TOO,
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    either_transport,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import Zero3Error

# Backends of a frame outside of forwards, with their options.
_BACKENDS = {
    "aot_eager": {"backend": "aot_eager"},
    "inductor": {"backend": "inductor"},
    "interpreted": {"backend": "zero3", "options": {"inductor": False}},
    "zero3": {"backend": "zero3"},
}
each_backend = pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        "interpreted",
        pytest.param("inductor", marks=INDUCTOR_TOO),
        pytest.param("zero3", marks=INDUCTOR_TOO),
    ],
)


@torch.no_grad()
def _project(layer):
    weight = layer.weight
    layer.weight.copy_(weight / weight.square().sum(1, keepdim=True).sqrt())


def _compiled_projections_follow_each_step(backend, transport):
    torch.manual_seed(0)
    model = Stack()
    model, reference = shard(model, model.blocks, transport=transport)
    run = compiled(model, "interpreted")
    project = torch.compile(_project, fullgraph=True, **_BACKENDS[backend])
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        mean_square(run, mine(batch_of(4, 8, seed=seed))).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        project(model.head)
        project(model.blocks[0].up)
        _project(reference.head)
        _project(reference.blocks[0].up)
        assert_same_parameters(model, reference)


@pytest.mark.thin
@each_backend
@either_transport
def test_a_compiled_write_outside_of_a_forward_changes_the_weight(run_ranks, backend, transport):
    run_ranks(2, _compiled_projections_follow_each_step, backend, transport)


def _shape_of(layer):
    weight = layer.weight
    return isinstance(weight, DTensor), (weight.detach() * 2).sum()


def _one_frame_sees_what_eager_code_sees(backend):
    model, _ = shard(Stack(depth=1))
    seen = torch.compile(_shape_of, fullgraph=True, **_BACKENDS[backend])

    def in_forward(module, args):
        found.append(seen(model.head))

    found = []
    model.head.register_forward_pre_hook(in_forward)
    for _ in range(2):
        assert seen(model.head)[0]
        model(batch_of(2, 8))
        assert not found[-1][0]
        assert seen(model.head)[0]
        model.unshard()
        is_sharded, total = seen(model.head)
        assert not is_sharded
        torch.testing.assert_close(total, found[-1][1])
        torch.testing.assert_close(seen(model.head)[1], total)
        model.reshard()
    assert seen(model.head)[1].full_tensor() == pytest.approx(total.item(), abs=1e-5)


@each_backend
def test_one_frame_sees_a_weight_whole_inside_and_sharded_outside_of_a_forward(run_ranks, backend):
    run_ranks(2, _one_frame_sees_what_eager_code_sees, backend)


class _Writes(Stack):
    def forward(self, x):
        with torch.no_grad():
            self.head.weight.mul_(2)
        return super().forward(x)


class _WritesInACheckpoint(_Writes):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def _a_write_in_a_compiled_forward_is_refused(backend, model_class):
    model, _ = shard(model_class(depth=1))
    with pytest.raises(BackendCompilerFailed, match=r"head\.weight' is modified in") as error:
        torch.compile(model, **_BACKENDS[backend])(batch_of(2, 8))
    assert isinstance(error.value.inner_exception, Zero3Error)


def _a_compiled_write_after_unshard_is_refused(backend):
    model, _ = shard(Stack(depth=1))
    model.unshard()
    with pytest.raises(BackendCompilerFailed, match=r"head\.weight' .*, while it is sharded"):
        torch.compile(_project, **_BACKENDS[backend])(model.head)


@each_backend
def test_a_compiled_write_after_unshard_is_refused(run_ranks, backend):
    run_ranks(2, _a_compiled_write_after_unshard_is_refused, backend)


@each_backend
@pytest.mark.parametrize("model_class", [_Writes, _WritesInACheckpoint])
def test_a_write_in_a_compiled_forward_is_refused(run_ranks, backend, model_class):
    run_ranks(2, _a_write_in_a_compiled_forward_is_refused, backend, model_class)
