"""Gradients of some ranks that come before all ranks gather in a backward.

Ranks then tell each other first which gradients they have: a rank that gathers sends zeros for
those of others.
"""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.models import assert_same_gradients, batch_of, each_way, either_transport, mine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.sharding.gradients import first_actions
from deepcompile_zero3.transport import one_host

KEPT = {"reshard_after_forward": False, "reshards": False}  # gathered for the next forward too

reentrant_or_not = pytest.mark.parametrize("use_reentrant", [True, False])


class Shifted(nn.Module):
    """Recomputes its block in backward, after the gradients of the shifts of its output."""

    def __init__(self, use_reentrant, shifts=2, width=8):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.block = nn.Linear(8, 8)
        self.shifts = nn.ParameterList(torch.zeros(width) for _ in range(shifts))
        self.use_reentrant = use_reentrant

    def forward(self, x, is_shifted):
        x = checkpoint(self.block, self.stem(x), use_reentrant=self.use_reentrant)
        loss = x.square().mean()
        for shift in self.shifts if is_shifted else ():  # saves nothing that a backward gathers
            loss = loss + (x.mean() + shift).mean()
        return loss


def _train(
    model, how="eager", mesh=None, block_mesh=None, micro_batches=1, reshards=True, **settings
):
    """Trains with shifts on the first rank only."""
    reference = copy.deepcopy(model)
    fully_shard(model.block, mesh=block_mesh or mesh, **settings)
    fully_shard(model, mesh=mesh, **settings).set_reduce_scatter_unused_params(True)
    model.set_reshard_after_backward(reshards)
    if how != "eager":
        options = {"keep_mb": 0, "inductor": how == "zero3"}
        model.block.compile(backend="zero3", options=options)
    world_size = dist.get_world_size()
    for seed in range(2 * micro_batches):
        batch = batch_of(2 * world_size, 8, seed=seed)
        model.set_requires_gradient_sync((seed + 1) % micro_batches == 0)
        model(mine(batch), dist.get_rank() == 0).backward()
        parts = enumerate(batch.chunk(world_size))
        sum(reference(rows, rank == 0) / world_size for rank, rows in parts).backward()
        if (seed + 1) % micro_batches == 0:
            assert_same_gradients(model, reference)


def _ahead(use_reentrant, how="eager", shape=(), **settings):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape) if shape else None
    _train(Shifted(use_reentrant), how, mesh, **settings)


@each_way
@either_transport
@reentrant_or_not
def test_gradients_of_some_ranks_ahead_of_a_recomputation_count_as_zero(
    run_ranks, how, transport, use_reentrant
):
    settings = {"how": how, "transport": transport}
    run_ranks(2, functools.partial(_ahead, use_reentrant, **settings), timeout=60)


@pytest.mark.thin
@either_transport
@reentrant_or_not
@pytest.mark.parametrize("how", ["eager", "interpreted"])
@pytest.mark.parametrize(
    "settings",
    [{"micro_batches": 2}, KEPT, {"reshard_after_forward": True}],
    ids=["sums of micro-batches", "nothing to gather again", "turns"],
)
def test_such_gradients_in_other_settings(run_ranks, how, transport, use_reentrant, settings):
    settings = settings | {"how": how, "transport": transport}
    run_ranks(2, functools.partial(_ahead, use_reentrant, **settings), timeout=60)


@either_transport
def test_such_gradients_of_some_replicas(run_ranks, transport):
    run_ranks(4, functools.partial(_ahead, False, shape=(2, 2), transport=transport), timeout=60)


def _two_groups(use_reentrant, transport):
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("a", "b")]
    _ahead(use_reentrant, block_mesh=meshes[0], transport=transport)


@either_transport
@reentrant_or_not
def test_such_gradients_of_two_process_groups(run_apart, transport, use_reentrant):
    run_apart(_two_groups, use_reentrant, transport)


def _full_mailbox(transport, settings):
    model = Shifted(use_reentrant=True, shifts=6, width=1 << 16)
    with mock.patch.object(one_host, "MAILBOX_BYTES", 0):  # room for two shifts
        _train(model, transport=transport, **settings)


@pytest.mark.parametrize("transport", ["shared_memory"])
@pytest.mark.parametrize("settings", [{}, KEPT], ids=["gathers", "nothing to gather again"])
def test_such_gradients_may_take_more_than_a_mailbox(run_apart, transport, settings):
    run_apart(_full_mailbox, transport, settings)


def _gradient_of_an_input(transport):
    """Asks a model for the gradient of its input between two micro-batches."""
    model = Shifted(use_reentrant=False)
    reference = copy.deepcopy(model)
    fully_shard(model, transport=transport)
    batch = batch_of(4, 8)
    for index in range(3):
        model.set_requires_gradient_sync(index != 0)
        x, whole = (rows.clone().requires_grad_() for rows in (mine(batch), batch))
        if index == 1:
            torch.autograd.grad(model(x, False), x)
            assert all(p.grad is None for p in model.parameters()), "sums wait for a backward"
        else:
            model(x, False).backward()
            reference(whole, False).backward()
    assert_same_gradients(model, reference)


@either_transport
def test_a_gradient_of_an_input_reduces_no_sums(run_ranks, transport):
    run_ranks(2, _gradient_of_an_input, transport, timeout=60)


class _Distilled(Shifted):
    """Runs a model of another backward in its recomputed block."""

    def __init__(self, teacher):
        super().__init__(use_reentrant=False)
        self.teacher = [teacher]  # no submodule

    def forward(self, x, is_shifted):
        x = checkpoint(self._body, self.stem(x), use_reentrant=False)
        loss = x.square().mean()
        for shift in self.shifts if is_shifted else ():
            loss = loss + (x.mean() + shift).mean()
        return loss

    def _body(self, x):
        with torch.no_grad():
            target = self.teacher[0](x)
        return self.block(x) * target


def _another_model_in_the_recomputation(transport, is_first):
    torch.manual_seed(0)
    teacher = nn.Linear(8, 8)  # trainable, in other backwards
    model = _Distilled(teacher)
    reference = copy.deepcopy(model)
    for each in (teacher, model) if is_first else (model, teacher):
        fully_shard(each, transport=transport)
    model.set_reduce_scatter_unused_params(True)
    batch = batch_of(4, 8)
    model(mine(batch), dist.get_rank() == 0).backward()
    for rank, rows in enumerate(batch.chunk(2)):
        (reference(rows, rank == 0) / 2).backward()
    assert_same_gradients(model, reference)


@either_transport
@pytest.mark.parametrize("is_first", [True, False], ids=["sharded first", "sharded last"])
def test_such_gradients_beside_a_model_without_any(run_ranks, transport, is_first):
    run_ranks(2, _another_model_in_the_recomputation, transport, is_first, timeout=60)


class _PlusStored(torch.autograd.Function):
    """Adds the loss of a stored graph, whose backward it runs. It recomputes nothing."""

    @staticmethod
    def forward(ctx, x, losses):
        [ctx.loss] = losses
        return x + ctx.loss.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.loss.backward(grad.sum())
        return grad, None


class _Stored(Shifted):
    """Has a graph of its block, whose backward runs inside of its own one."""

    def forward(self, x, is_shifted):
        x = self.stem(x)
        x = _PlusStored.apply(x, [self.block(x.detach()).square().mean()])
        loss = x.square().mean()
        for shift in self.shifts if is_shifted else ():
            loss = loss + (x.mean() + shift).mean()
        return loss


def _backward_in_backward(how, settings):
    torch.manual_seed(0)
    _train(_Stored(use_reentrant=False, shifts=3), how, **settings)


@pytest.mark.thin
@each_way
@either_transport
def test_such_gradients_ahead_of_a_backward_that_recomputes_nothing(run_ranks, how, transport):
    run_ranks(2, _backward_in_backward, how, {"transport": transport}, timeout=60)


def _only_gathered_in_the_recomputation(transport):
    """The student is in the outer graph on the first rank alone, and its teacher on none."""
    torch.manual_seed(0)
    teacher = nn.Linear(8, 8)  # trainable, in other backwards
    model = _Taught(teacher)
    reference = copy.deepcopy(model)
    for each in (teacher, model):
        fully_shard(each, transport=transport)
    batch = batch_of(4, 8).requires_grad_()
    model(mine(batch), dist.get_rank() == 0).backward()
    for rank, rows in enumerate(batch.chunk(2)):
        (reference(rows, rank == 0) / 2).backward()
    assert_same_gradients(model, reference)


class _Taught(_Distilled):
    def forward(self, x, is_shifted):
        x = checkpoint(self._body, x, use_reentrant=True)
        loss = x.square().mean()
        for shift in self.shifts if is_shifted else ():
            loss = loss + (x.mean() + shift).mean()
        return loss

    def _body(self, x):
        with torch.no_grad():
            target = self.teacher[0](x)
        return self.block(self.stem(x)) * target


@either_transport
@pytest.mark.gloo
def test_such_gradients_of_a_model_whose_other_graphs_are_inner_ones(run_ranks, transport):
    run_ranks(2, _only_gathered_in_the_recomputation, transport, timeout=60)


def _raises_beside_a_sum(transport):
    """A backward that gathers another model raises between two micro-batches of that model."""
    torch.manual_seed(0)
    teacher = nn.Linear(8, 8)
    model = _Distilled(teacher)
    reference = copy.deepcopy(teacher)
    for each in (teacher, model):
        fully_shard(each, transport=transport)
    batch = batch_of(4, 8)
    teacher.set_requires_gradient_sync(False)
    teacher(mine(batch)).square().mean().backward()
    teacher.set_requires_gradient_sync(True)
    x = mine(batch).requires_grad_()
    x.register_hook(_raise)
    with pytest.raises(ArithmeticError):
        model(x, True).backward()
    for _ in range(2):
        reference(batch).square().mean().backward()
    teacher(mine(batch)).square().mean().backward()
    assert_same_gradients(teacher, reference)


def _raise(_):
    raise ArithmeticError


@either_transport
def test_a_backward_that_raises_keeps_sums_of_a_model_that_it_only_gathers(run_ranks, transport):
    run_ranks(2, _raises_beside_a_sum, transport, timeout=60)


class _Beside(nn.Module):
    """Returns what it is given beside its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, kept):
        return self.linear(x), kept


@needs_a_job
def test_a_tensor_that_forwards_return_again_announces_a_model_once(monkeypatch):
    announced = []
    monkeypatch.setattr(first_actions, "_announce", lambda handles, _: announced.extend(handles))
    kept = torch.ones(1, requires_grad=True).exp()
    models = [fully_shard(_Beside()) for _ in range(2)]
    for model in models * 3:
        model(torch.ones(1, 8), kept)
    kept.backward()
    assert len(announced) == len(models)
