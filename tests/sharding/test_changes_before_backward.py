"""Parameters that change between a forward and its backward, or while they are gathered."""

import contextlib
import functools
import time

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Stack,
    assert_same_gradients,
    batch_of,
    compiled,
    each_way,
    in_little_memory,
    mean_square,
    mine,
    shard,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import Zero3Error, fully_shard, step_locally

each_transport = pytest.mark.parametrize("transport", ["shared_memory", "c10d"])


@contextlib.contextmanager
def _others(model):
    """Replaces the model's weights by others, such as a teacher's or an average's."""
    for parameter in model.parameters():
        parameter.data.mul_(3)
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.data.div_(3)


class Checkpointed(Stack):
    use_reentrant = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class CheckpointedReentrantly(Checkpointed):
    use_reentrant = True

    def forward(self, x):
        return super().forward(x.requires_grad_())


def _swap(how, model_class, transport, reshard_after_forward, is_recorded):
    torch.manual_seed(0)
    model = model_class()
    settings = {"transport": transport, "reshard_after_forward": reshard_after_forward}
    model, reference = shard(model, model.blocks, **settings)
    if how == "compiled blocks":
        for block in model.blocks:
            block.compile(backend="zero3", options={"inductor": False, "keep_mb": 0})
    match how:
        case "compiled blocks":
            run = model
        case "another backend":
            run = torch.compile(model, backend="aot_eager")
        case _:
            run = compiled(model, how)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        student = mean_square(run, mine(batch))
        with _others(model), torch.set_grad_enabled(is_recorded):
            run(mine(batch_of(4, 8, seed=9)))
        student.backward()
        mean_square(reference, batch).backward()
        assert_same_gradients(model, reference)


@pytest.mark.thin
@each_transport
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("model_class", [Stack, Checkpointed])
@each_way
def test_a_backward_has_its_own_forwards_weights_whatever_ran_since(
    run_ranks, how, model_class, reshard_after_forward, transport
):
    for is_recorded in (False, True):
        run_ranks(2, _swap, how, model_class, transport, reshard_after_forward, is_recorded)


@pytest.mark.thin
@each_transport
@pytest.mark.parametrize(
    ("compiler", "model_class"),
    [
        ("compiled blocks", Checkpointed),
        ("compiled blocks", CheckpointedReentrantly),
        ("another backend", Checkpointed),
    ],
)
def test_so_it_has_where_what_was_compiled_is_computed_again(
    run_ranks, compiler, model_class, transport
):
    run_ranks(2, _swap, compiler, model_class, transport, True, False)


def _swap_in_turns(how):
    _swap(how, Stack, "shared_memory", True, is_recorded=False)


@pytest.mark.gloo
@each_way
def test_so_it_has_where_copies_take_turns(run_ranks, how):
    run_ranks(2, in_little_memory, _swap_in_turns, how)


def _multiply(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def _take_a_step(kind, is_local, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{kind: True} if kind else {})
    if is_local:
        step_locally(optimizer)
    optimizer.step()


changes = [_multiply] + [
    functools.partial(_take_a_step, kind, is_local)
    for kind in ("fused", "foreach")
    for is_local in (False, True)
]


def _change_before_backward(how, rows, change):
    """Compares the gradients of both transports."""
    found = []
    for transport in ("shared_memory", "c10d"):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, rows), nn.Linear(rows, 8)) for _ in range(4)]
        model = nn.Sequential(*blocks)
        model, _ = shard(model, blocks, transport=transport, reshard_after_forward=True)
        run = compiled(model, how)
        for changes_now in (False, True):  # the optimizer needs gradients
            loss = mean_square(run, mine(batch_of(4, 8)).requires_grad_())
            if changes_now:
                change(model)
            loss.backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for ours, by_messages in zip(*found, strict=True):
        torch.testing.assert_close(ours, by_messages)


@pytest.mark.gloo
@pytest.mark.thin
@pytest.mark.parametrize("rows", [8, 65])  # 65: the first rank has more, and not whole vectors
@pytest.mark.parametrize("change", changes)
@each_way
def test_backward_gathers_changed_parameters_anew(run_ranks, how, rows, change):
    run_ranks(2, _change_before_backward, how, rows, change)


def _change_on_one_rank(how, transport):
    torch.manual_seed(0)
    model, reference = shard(Stack(), transport=transport)
    loss = mean_square(compiled(model, how), mine(batch_of(4, 8)).requires_grad_())
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.head.weight.mul_(1)
    if transport == "c10d":
        loss.backward()
        mean_square(reference, batch_of(4, 8)).backward()
        assert_same_gradients(model, reference)
    else:
        names = r"head\.weight', which has changed on rank 1 since" if dist.get_rank() == 1 else ""
        with pytest.raises(Zero3Error, match=names):
            loss.backward()


@each_transport
@each_way
def test_a_change_on_one_rank_alone_is_gathered_or_refused_by_name(run_apart, how, transport):
    run_apart(_change_on_one_rank, how, transport)


def _step_while_held(how, rows, change, transport):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, rows), nn.Linear(rows, 8)) for _ in range(4)]
    model, _ = shard(nn.Sequential(*blocks), blocks, transport=transport)
    model.set_reshard_after_backward(False)
    run = compiled(model, how)
    mean_square(run, mine(batch_of(4, 8))).backward()
    mean_square(run, mine(batch_of(4, 8))).backward()  # nothing has changed
    change(model)
    with pytest.raises(Zero3Error, match=r"0\.0\.weight' has changed since it was gathered"):
        run(mine(batch_of(4, 8)))


@pytest.mark.thin
@each_transport
@pytest.mark.parametrize("rows", [8, 65])
@pytest.mark.parametrize("change", changes)
@each_way
def test_a_step_while_weights_are_held_is_refused(run_ranks, how, rows, change, transport):
    run_ranks(2, _step_while_held, how, rows, change, transport)


def _take_a_compiled_step(kind, backend, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{kind: True})
    torch.compile(optimizer.step, backend=backend)()


@pytest.mark.parametrize(("kind", "backend"), [("fused", "aot_eager"), ("foreach", "eager")])
def test_a_compiled_step_while_weights_are_held_is_refused(run_ranks, kind, backend):
    change = functools.partial(_take_a_compiled_step, kind, backend)
    run_ranks(2, _step_while_held, "eager", 8, change, "c10d")


class Chosen(nn.Module):
    """A model, in two dtypes, of which autograd saves different tensors on each rank."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)

    def forward(self, x, needs_first):
        x = x.bfloat16().requires_grad_(needs_first)  # otherwise the first weight is not needed
        return self.second(self.first(x).float())


def _swap_where_ranks_save_other_things():
    torch.manual_seed(0)
    model, reference = shard(Chosen(), transport="shared_memory")
    batch = batch_of(6, 8)
    for needs_first in range(3):
        student = mean_square(lambda x: model(x, dist.get_rank() == needs_first), mine(batch))  # noqa: B023
        with _others(model), torch.no_grad():
            model(mine(batch), False)
        if dist.get_rank() == 2:
            time.sleep(0.05)  # this rank comes last
        student.backward()
        mean_square(lambda x: reference(x, True), batch).backward()
        assert_same_gradients(model, reference, tolerance=2e-2)


@pytest.mark.gloo
def test_ranks_that_save_other_things_publish_together(run_ranks):
    run_ranks(3, _swap_where_ranks_save_other_things)


# ---- while they are gathered


def _step_while_gathering(transport):
    torch.manual_seed(0)
    blocks = [fully_shard(nn.Linear(8, 8, bias=False), transport=transport) for _ in range(6)]
    for _ in range(3):
        before = [block.weight.detach().full_tensor() for block in blocks]
        handles = [block.unshard(async_op=True) for block in blocks]
        with torch.no_grad():
            for block in blocks:
                block._parameters["weight"].add_(1)
        for block, handle, old in zip(blocks, handles, before, strict=True):
            handle.wait()
            assert torch.equal(block.weight, old)
            block.reshard()
            assert torch.equal(block.weight.full_tensor(), old + 1)


@each_transport
def test_a_gather_returns_the_values_from_its_start(run_ranks, transport):
    run_ranks(2, _step_while_gathering, transport)
    run_ranks(2, in_little_memory, _step_while_gathering, transport)
