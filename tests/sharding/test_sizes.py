"""Parameters of every size, layout and use get the same gradients as in one process."""

import copy

import torch
import torch.distributed as dist
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from torch import nn

from deepcompile_zero3 import capture_graphs, record_collectives


def _two_steps(model, how, width, blocks=(), **settings):
    """Compares two steps with one process."""
    model, reference = shard(model, blocks, **settings)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, width, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    return model


# ---- rows that do not divide by the ranks


def _uneven_rows(how, transport):
    # Rows 7, 5 and 1: two ranks own 4+3, 3+2, 1+0; four ranks own 2+2+2+1, 2+2+1+0, 1+0+0+0.
    layers = nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)
    model = _two_steps(nn.Sequential(*layers), how, width=6, transport=transport)
    return [parameter.to_local().shape[0] for parameter in model.parameters()]


@each_way
@either_transport
def test_rows_need_not_divide_by_two_ranks(run_ranks, how, transport):
    assert run_ranks(2, _uneven_rows, how, transport) == [[4, 4, 3, 3, 1, 1], [3, 3, 2, 2, 0, 0]]


@each_way
@either_transport
def test_a_rank_of_four_may_own_no_row(run_ranks, how, transport):
    assert run_ranks(4, _uneven_rows, how, transport) == [
        [2, 2, 2, 2, 1, 1],
        [2, 2, 2, 2, 0, 0],
        [2, 2, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0],
    ]


def _one_row(how):
    _two_steps(nn.Linear(6, 1), how, width=6)


@each_way
def test_a_rank_may_own_nothing_of_a_whole_model(run_ranks, how):
    run_ranks(4, _one_row, how)


# ---- layouts


class _Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(batch_of(6, 4).t())
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv((x @ self.weight).view(-1, 2, 1, 3).expand(-1, -1, 3, -1))


def _non_contiguous(how):
    torch.manual_seed(0)
    model = _Transposed()
    strides = model.weight.stride(), model.conv.weight.stride()
    assert strides == ((1, 4), (8, 1, 4, 2))
    _two_steps(model, how, width=4)


@each_way
def test_parameters_need_not_be_contiguous(run_ranks, how):
    run_ranks(2, _non_contiguous, how)


class _Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 2, stride=2)
        self.head = nn.Linear(128, 5)

    def forward(self, x):
        return self.head(self.conv(x.view(-1, 3, 4, 4)).flatten(1))


def _convolution(how):
    _two_steps(_Convolution(), how, width=48)


@each_way
def test_a_convolution_gets_its_weight_in_the_layout_of_the_parameter(run_ranks, how):
    # A compiler that prefers channels last may reorder a gathered weight, but not the gather.
    run_ranks(2, _convolution, how)


# ---- what is beside the parameters


def _batch_norm(how):
    model, reference = shard(
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3))
    )
    own_rows_only = copy.deepcopy(reference)
    run = compiled(model, how)
    for seed in range(2):
        batch = batch_of(8, 4, seed=seed)
        mean_square(run, mine(batch)).backward()
        # Each rank normalizes over its own rows.
        world_size = dist.get_world_size()
        for rows in batch.chunk(world_size):
            (mean_square(reference, rows) / world_size).backward()
        assert_same_gradients(model, reference)
        own_rows_only(mine(batch))
        for (name, ours), theirs in zip(
            model.named_buffers(), own_rows_only.buffers(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, msg=name)


@each_way
def test_buffers_stay_whole_and_are_updated(run_ranks, how):
    run_ranks(2, _batch_norm, how)


# ---- parameters that are not used once, in one place


class _Frozen(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)


def _frozen(how):
    model = _Frozen()
    _two_steps(model, how, width=8, blocks=model.blocks)


@each_way
def test_a_frozen_parameter_gets_no_gradient(run_ranks, how):
    run_ranks(2, _frozen, how)


class _Quantized(nn.Module):
    """A module with a frozen parameter of a dtype that is not computed with."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.codes = nn.Parameter(torch.arange(24).view(3, 8).to(dtype), requires_grad=False)

    def forward(self, x):
        return x @ (self.codes.float() * self.scale).t()


def _quantized(how):
    for dtype in [torch.int8, torch.float8_e4m3fn]:
        _two_steps(_Quantized(dtype), how, width=8)


@each_way
def test_a_frozen_parameter_may_be_quantized(run_ranks, how):
    run_ranks(2, _quantized, how)


class _Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


def _unused(how):
    model = _two_steps(_Unused(), how, width=8)
    assert model.unused.weight.grad is None


@each_way
def test_a_parameter_never_used_has_no_gradient(run_ranks, how):
    run_ranks(2, _unused, how)


class _Repeated(nn.Module):
    """A module that uses a linear layer twice, and its weight a third time under another name."""

    def __init__(self, breaks):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.linear.weight
        self.breaks = breaks

    def forward(self, x):
        x = self.linear(x).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.tied(self.linear(x).tanh())


def _repeated(how, breaks):
    """Returns how often each parameter is reduced in a backward, and the number of graphs."""
    model, reference = shard(_Repeated(breaks))
    assert model.tied.weight is model.linear.weight
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        with record_collectives() as log, capture_graphs() as graphs:
            assert_same_step(
                model, reference, batch_of(4, 8, seed=seed), run=run, optimizers=optimizers
            )
        reduced = [fqn for c in log if c.op == "reduce_scatter" for fqn in c.params]
        assert sorted(reduced) == ["linear.bias", "linear.weight"], reduced
        if seed == 0:
            compiled_graphs = len(graphs.backward)
    return compiled_graphs


@each_way
def test_a_parameter_used_again_and_tied_is_reduced_once(run_ranks, how):
    graphs = 0 if how == "eager" else 1
    assert run_ranks(2, _repeated, how, False) == [graphs] * 2


@each_way
def test_a_parameter_used_in_two_graphs_is_reduced_once(run_ranks, how):
    graphs = 0 if how == "eager" else 2
    assert run_ranks(2, _repeated, how, True) == [graphs] * 2


# ---- from step to step


def _requires_grad_toggled(how):
    model, reference = shard(Stack(depth=1))
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed, trains in enumerate([True, False, True, False]):
        for m in (model, reference):
            m.blocks[0].up.requires_grad_(trains)
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@each_way
def test_requires_grad_may_change_between_steps(run_ranks, how):
    run_ranks(2, _requires_grad_toggled, how)


def _accumulated(how):
    model, reference = shard(Stack(depth=1))
    run = compiled(model, how)
    for seed in range(3):  # compares sums of gradients
        assert_same_step(model, reference, batch_of(4, 8, seed=seed), run=run)


@each_way
def test_backwards_add_up_in_grad(run_ranks, how):
    run_ranks(2, _accumulated, how)


def _accumulated_without_sync(how):
    model, reference = shard(Stack(depth=1))
    run = compiled(model, how)
    for _ in range(2):
        with record_collectives() as log:
            model.set_requires_gradient_sync(False)
            for seed in range(2):
                batch = batch_of(4, 8, seed=seed)
                mean_square(run, mine(batch)).backward()
                mean_square(reference, batch).backward()
                assert all(parameter.grad is None for parameter in model.parameters())
            assert not [c for c in log if c.op == "reduce_scatter"]
            model.set_requires_gradient_sync(True)
            assert_same_step(model, reference, batch_of(4, 8, seed=2), run=run)
        reduced = [fqn for c in log if c.op == "reduce_scatter" for fqn in c.params]
        assert sorted(reduced) == sorted(name for name, _ in model.named_parameters())
        for m in (model, reference):
            m.zero_grad()


@each_way
def test_micro_batches_without_sync_are_reduced_with_the_synced_one(run_ranks, how):
    run_ranks(2, _accumulated_without_sync, how)
