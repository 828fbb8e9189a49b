"""Large gradients, which the runtime computes directly in the send buffer."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.models import (
    INDUCTOR_TOO,
    assert_same_gradients,
    batch_of,
    compiled,
    compiled_each_way,
    each_way,
    relative_difference,
    shard,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import capture_graphs, defer_reduction, deposit_grad
from deepcompile_zero3.graph.metadata import fqns_of
from deepcompile_zero3.runtime import _C


class _Large(nn.Module):
    """A model of sizes that ranks do not divide, a weight used twice and a row without gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(701, 131, padding_idx=3)
        self.up = nn.Linear(131, 307)
        self.down = nn.Linear(307, 131, bias=False)
        self.small = nn.Linear(131, 5)

    def forward(self, indices):
        hidden = self.embedding(indices)
        for _ in range(2):
            hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return self.small(hidden)


def _indices(rank, seed):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randint(701, (3 + rank, 7), generator=generator)  # a different shape on every rank


def _loss(model, indices):
    return model(indices).float().square().sum()


def _train(how, policy, tolerance):
    policy = MixedPrecisionPolicy(**policy)
    model, reference = shard(_Large(), mp_policy=policy)
    if policy.param_dtype:
        reference.to(policy.param_dtype)
    run = compiled(model, how)
    world_size = dist.get_world_size()
    for step in range(2):
        expected = copy.deepcopy(reference)
        model.zero_grad()
        # Two micro-batches, the first not synced, then a third that adds to `.grad`.
        for micro_batch, sync in enumerate([False, True, True]):
            model.set_requires_gradient_sync(sync)
            seed = 3 * step + micro_batch
            _loss(run, _indices(dist.get_rank(), seed)).backward()
            for rank in range(world_size):
                (_loss(expected, _indices(rank, seed)) / world_size).backward()
        for (fqn, ours), theirs in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            assert isinstance(ours.grad, DTensor)
            assert ours.grad.dtype == ours.dtype
            assert ours.grad.to_local().shape == ours.to_local().shape
            difference = relative_difference(ours.grad.full_tensor(), theirs.grad)
            assert difference <= tolerance, f"{fqn}: {difference:.1e}"


# Inductor decomposes an embedding's gradient, which the runtime then computes.
@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        (2, "eager"),
        (1, "interpreted"),
        (3, "interpreted"),
        pytest.param(2, "zero3", marks=pytest.mark.inductor),
        pytest.param(2, "interpreted", marks=pytest.mark.long),
        pytest.param(3, "eager", marks=pytest.mark.long),
        pytest.param(3, "zero3", marks=INDUCTOR_TOO),
    ],
)
def test_large_gradients_are_right(run_ranks, world_size, how):
    run_ranks(world_size, _train, how, {}, 1e-5)


@pytest.mark.thin
@each_way
@pytest.mark.parametrize(
    "policy",
    [
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.bfloat16},
        {"reduce_dtype": torch.float16},
    ],
)
def test_large_gradients_are_right_in_mixed_precision(run_ranks, how, policy):
    run_ranks(2, _train, how, policy, 3e-2)


def _ops_of_backward():
    model = shard(_Large())[0]
    with capture_graphs() as graphs:
        _loss(compiled(model, "zero3"), _indices(0, 0)).backward()
    (backward,) = graphs.backward
    nodes = backward.graph_module.graph.nodes
    return {fqns_of(node)[0]: node.target.name() for node in nodes if "reduce" in str(node.target)}


@pytest.mark.inductor
def test_large_gradients_are_computed_by_the_runtime(run_ranks):
    for ops in run_ranks(1, _ops_of_backward):
        assert ops == {
            "embedding.weight": "zero3::reduce_rows",
            "up.weight": "zero3::reduce_grad",  # used twice: a sum of products
            "up.bias": "zero3::reduce_grad",
            "down.weight": "zero3::reduce_grad",
            "small.weight": "zero3::reduce_grad",
            "small.bias": "zero3::reduce_grad",
        }


class _Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(600, 128)
        self.linear = nn.Linear(128, 300)

    def forward(self, indices):
        return torch.tanh(self.linear(self.table(indices)))


def _grads_live_on(how):
    """Checks that gradients stay valid, whatever memory they came from."""
    model, reference = shard(_Once())
    run = compiled(model, how)
    kept = []
    for seed in range(4):
        model.zero_grad()
        reference.zero_grad()
        for rank in range(dist.get_world_size()):
            indices = _indices(rank, seed) % 600
            if rank == dist.get_rank():
                _loss(run, indices).backward()
            (_loss(reference, indices) / dist.get_world_size()).backward()
        assert_same_gradients(model, reference)
        weight = model.linear.weight
        kept.append((weight.grad, reference.linear.weight.grad.clone()))
        copied = copy.deepcopy(weight.grad)
        copied.mul_(2)
    for ours, theirs in kept:
        assert relative_difference(ours.full_tensor(), theirs) <= 1e-5
    return sorted({c.target.name() for c in _reductions(run)})


def _reductions(run):
    torch._dynamo.reset()
    with capture_graphs() as graphs:
        _loss(run, _indices(0, 0) % 600).backward()
    nodes = graphs.backward[0].graph_module.graph.nodes
    return [node for node in nodes if "zero3.reduce" in str(node.target)]


@compiled_each_way
@pytest.mark.smoke
def test_gradients_outlive_the_memory_of_later_steps(run_ranks, how):
    for ops in run_ranks(2, _grads_live_on, how):
        # The embedding's gradient is not reduced by them op by op, nor in torch 2.11.
        assert {"zero3::reduce_grad", "zero3::reduce_mm"} <= set(ops)


def _few_rows(how, dtype, reduce_dtype, tolerance):
    """Checks the gradient of a weight of which the last of four ranks has no rows."""
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    model, reference = shard(nn.Linear(20_000, 3, bias=False).to(dtype), mp_policy=policy)
    run = compiled(model, how)
    world_size = dist.get_world_size()
    batches = [batch_of(2, 20_000, seed=rank).to(dtype) for rank in range(world_size)]
    loss = run(batches[dist.get_rank()]).cos().sum()
    loss.backward(retain_graph=how == "eager")
    for batch in batches:
        (reference(batch).cos().sum() / world_size).backward()
    assert_same_gradients(model, reference, tolerance)
    if how == "eager":  # a second backward of the same graph adds the same
        loss.backward()
        reference.weight.grad.mul_(2)
        assert_same_gradients(model, reference, tolerance)


@pytest.mark.thin
@each_way
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "tolerance"),
    [(torch.float64, None, 1e-12), (torch.float32, torch.float16, 1e-2)],
)
def test_a_large_gradient_of_few_rows(run_ranks, how, dtype, reduce_dtype, tolerance):
    run_ranks(4, _few_rows, how, dtype, reduce_dtype, tolerance)


def _of_the_input_alone(how):
    model, reference = shard(nn.Linear(256, 256))
    x, same = batch_of(2, 256).requires_grad_(), batch_of(2, 256).requires_grad_()
    (grad,) = torch.autograd.grad(compiled(model, how)(x).cos().sum(), [x])
    reference(same).cos().sum().backward()
    assert relative_difference(grad, same.grad) <= 1e-5
    assert all(parameter.grad is None for parameter in model.parameters())


@compiled_each_way
def test_a_gradient_that_nobody_wants_is_not_reduced(run_ranks, how):
    run_ranks(2, _of_the_input_alone, how)


class _Recurrent(nn.Module):
    """A module that uses a weight once for each element of a sequence."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(256, 256, bias=False)

    def forward(self, x):
        hidden = x[:, 0]
        for step in range(x.shape[1]):
            hidden = torch.tanh(self.cell(hidden) + x[:, step])
        return hidden


def _each_rank_its_own_way(how):
    model, reference = shard(_Recurrent())
    run = compiled(model, how)
    world_size = dist.get_world_size()
    batches = [batch_of(4, 1 + 2 * rank, 256, seed=rank) for rank in range(world_size)]
    # The input needs a gradient, so that backward needs the weight on every rank.
    run(batches[dist.get_rank()].requires_grad_()).sum().backward()
    for batch in batches:
        (reference(batch).sum() / world_size).backward()
    assert_same_gradients(model, reference)


@each_way
def test_a_rank_may_have_one_product_and_another_a_sum(run_ranks, how):
    run_ranks(2, _each_rank_its_own_way, how)


def _deposit_on_one_rank():
    model, _ = shard(nn.Linear(256, 256, bias=False))
    grad = batch_of(256, 256)
    with defer_reduction(model):
        if dist.get_rank() == 0:
            deposit_grad(model.weight, grad.t())
    assert relative_difference(model.weight.grad.full_tensor(), grad.t() / 2) <= 1e-6


def test_a_sum_may_have_other_strides_on_another_rank(run_ranks):
    run_ranks(2, _deposit_on_one_rank)


def _resize():
    model, _ = shard(nn.Linear(256, 256))
    model(batch_of(2, 256)).sum().backward()
    grad = model.weight.grad.to_local()
    before = grad.clone()
    assert torch.equal(copy.deepcopy(grad), before)
    grad.resize_(300, 256)
    assert torch.equal(grad[: len(before)], before)
    grad.untyped_storage().resize_(0)


def test_a_gradient_can_be_resized(run_ranks):
    run_ranks(2, _resize)


def _train_blocks(how, dtype, replicas):
    """Trains weights that are sent and summed in blocks; ranks do not divide their rows evenly."""
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    layers = [nn.Linear(1301, 1901, bias=False), nn.Tanh(), nn.Linear(1901, 1301, bias=False)]
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model, reference = shard(nn.Sequential(*layers), mp_policy=policy, mesh=mesh)
    reference.to(dtype)
    run = compiled(model, how)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        expected = copy.deepcopy(reference)
        model.zero_grad()
        for seed in (2 * step, 2 * step + 1):
            batch = batch_of(2 * world_size, 1301, seed=seed)
            for other, rows in enumerate(batch.chunk(world_size)):
                if other == rank:
                    run(rows).float().square().sum().backward()
                (expected(rows.to(dtype)).float().square().sum() / world_size).backward()
        assert_same_gradients(model, expected, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("world_size", "how", "dtype", "replicas"),
    [
        (2, "interpreted", torch.float32, 1),
        (3, "eager", torch.float32, 1),
        (2, "eager", torch.bfloat16, 1),
        (2, "interpreted", torch.float16, 1),
        pytest.param(2, "zero3", torch.float32, 1, marks=INDUCTOR_TOO),
        (4, "eager", torch.float32, 2),
    ],
)
def test_gradients_of_several_blocks_are_right(run_ranks, world_size, how, dtype, replicas):
    run_ranks(world_size, _train_blocks, how, dtype, replicas)


def test_small_gradients_are_one_block():
    def progress_bytes(rows, row_bytes):
        return _C.progress_bytes(_C.RowLayout.chunked(rows, 2), row_bytes)

    assert progress_bytes(10, 4) == 2 * 64  # a cache line for each rank
    assert progress_bytes(8192, 4096) == 8 * 2 * 64  # and for each 4 MiB
