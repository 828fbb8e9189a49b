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
    shard_stack,
)
from torch import nn
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


def _multiplies(model, x):
    with torch.no_grad():
        model.head.weight.mul_(3)
    return model(x)


def _multiplies_between(model, x):
    return model(x) + _multiplies(model, x)


def _multiplies_all(model, x):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 3)
    return model(x)


def _multiplies_data(model, x):
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model(x)


def _multiplies_local(model, x):
    weight = model.blocks[0].up.weight
    with torch.no_grad():
        (weight.to_local() if isinstance(weight, DTensor) else weight).mul_(3)
    return model(x)


def _registers_another(model, x):
    model.head.weight = nn.Parameter(model.head.weight.detach() * 3)
    return model(x)


def _reads_of_others(model, x):
    others = {name: 3 * each.detach() for name, each in model.named_parameters()}
    return torch.func.functional_call(model, others, (x,))


_CHANGES = (
    *(_multiplies, _multiplies_between, _multiplies_all, _multiplies_data, _multiplies_local),
    *(_registers_another, _reads_of_others),
)


@pytest.mark.thin
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("backend", ["interpreted", "aot_eager"])
@pytest.mark.parametrize("change", _CHANGES)
def test_a_forward_sees_what_compiled_code_has_changed_ahead_of_it(backend, change):
    model, reference = shard_stack(depth=1)
    run = torch.compile(change, **_BACKENDS[backend])
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        with torch.set_grad_enabled(change is _multiplies):
            ours, theirs = run(model, batch), change(reference, batch)
        torch.testing.assert_close(ours, theirs)
    if theirs.requires_grad:
        ours.square().mean().backward()
        theirs.square().mean().backward()
        assert_same_gradients(model, reference)
    assert_same_parameters(model, reference)


@pytest.mark.usefixtures("one_rank")
def test_what_compiled_code_reads_ahead_of_a_forward_ends_no_graph():
    model, reference = shard_stack(depth=1)

    def with_square(model, x):
        weight = model.head.weight
        return model(x), weight.detach().square()

    run = torch.compile(with_square, fullgraph=True, **_BACKENDS["interpreted"])
    batch = batch_of(4, 8)
    (output, square), (expected, whole) = run(model, batch), with_square(reference, batch)
    torch.testing.assert_close((output, square.full_tensor()), (expected, whole))


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
