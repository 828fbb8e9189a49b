"""Gradients that only some ranks have: they count as zero on the others, or all ranks raise.

``set_reduce_scatter_unused_params(True)`` has no effect over gloo: over collectives, in which
test_collectives.py and ``--transport collectives`` run models of these tests, it has.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from support.experts import (
    FOUR,
    SEVERAL,
    THREE,
    TWO,
    loss_of_all,
    sharded,
    train_experts,
    train_in_several_forwards,
)
from support.models import (
    assert_same_gradients,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import (
    MixedPrecisionPolicy,
    fully_shard,
    gradient_norms,
    step_in_backward,
)


@pytest.mark.thin
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize("width", [8, 256])  # sent together, and alone
def test_experts_that_some_ranks_use_are_trained(run_ranks, width, transport, micro_batches):
    run_ranks(2, train_experts, TWO, width, transport, micro_batches, (2,))


@pytest.mark.parametrize("width", [8, pytest.param(150, marks=pytest.mark.more), 256])
def test_no_bucket_waits_for_what_some_ranks_have(run_ranks, width):
    """Each gradient fills a bucket, and waits for the previous one."""
    run_ranks(2, train_experts, TWO, width, "c10d", 1, (2,), 4 * width)
    run_ranks(3, train_experts, THREE, width, "c10d", 2, (3,), 4 * width)


@pytest.mark.thin
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_experts_that_some_replicas_use_are_trained(run_ranks, transport, micro_batches):
    run_ranks(4, train_experts, FOUR, 8, transport, micro_batches, (2, 2))


@pytest.mark.thin
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize("width", [8, 256])
def test_ranks_may_use_experts_in_other_forwards(run_ranks, width, transport, backwards):
    run_ranks(2, train_in_several_forwards, SEVERAL, width, transport, (2,), backwards)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_replicas_may_use_experts_in_other_forwards(run_ranks, transport):
    steps = [[choices + choices[::-1] for choices in step] for step in SEVERAL]
    run_ranks(4, train_in_several_forwards, steps, 8, transport, (2, 2), 1)


class TwoGraphs(nn.Module):
    """Two functions of shared weights, each a graph of its own."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(width, width) / width) for _ in range(2))

    def forward(self, x, both):
        return (x @ self.b @ self.a @ self.a).sin().mean() if both else (x @ self.a).cos().mean()


def _reach_unequally_many_graphs(backend, transport, width, steps):
    """The first rank's loss reaches a graph more, in which a weight comes that is last of all."""
    torch.manual_seed(0)
    reference = TwoGraphs(width)
    model = fully_shard(copy.deepcopy(reference), transport=transport, reshard_after_forward=False)
    model.set_reduce_scatter_unused_params(True)
    options = {"inductor": False} if backend == "zero3" else None
    run = torch.compile(model, backend=backend, options=options)

    def loss(function, rows, rank):
        one, both = function(rows, False), function(rows, True)
        return one + both if rank == 0 else both

    for seed in range(steps):
        batch = batch_of(4, width, seed=seed)
        loss(run, mine(batch), dist.get_rank()).backward()
        sum(loss(reference, rows, rank) for rank, rows in enumerate(batch.chunk(2))).div(
            2
        ).backward()
        assert_same_gradients(model, reference)


@pytest.mark.thin
@pytest.mark.parametrize("backend", ["zero3", "aot_eager"])
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize("width", [8, 256])
def test_ranks_may_reach_unequally_many_graphs(run_ranks, backend, transport, width):
    run_ranks(2, _reach_unequally_many_graphs, backend, transport, width, 2)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.body(x).tanh()
        return self.left(x), self.right(x)


def _one_loss(transport, how):
    """Trains with a loss that uses the right head on rank 0 only."""
    torch.manual_seed(0)
    model = TwoHeads()
    reference = copy.deepcopy(model)
    fully_shard(model, transport=transport).set_reduce_scatter_unused_params(True)
    run = compiled(model, how, keep_mb=64)

    def loss(outputs, rank):
        left, right = outputs
        return left.square().mean() + (right.square().mean() if rank == 0 else 0)

    batch = batch_of(4, 8)
    loss(run(mine(batch)), dist.get_rank()).backward()
    sum(loss(reference(rows), rank) for rank, rows in enumerate(batch.chunk(2))).div(2).backward()
    assert_same_gradients(model, reference)


@each_way
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_a_loss_may_leave_a_head_out(run_ranks, transport, how):
    run_ranks(2, _one_loss, transport, how)


def _two_models(transport):
    """Trains three models of one large parameter: one call of ranks is pending in the next."""
    torch.manual_seed(0)
    models = [nn.Linear(256, 256, bias=False) for _ in range(3)]
    references = copy.deepcopy(models)
    for model in models:
        fully_shard(model, transport=transport).set_reduce_scatter_unused_params(True)
    for seed in range(2):
        batch = batch_of(4, 256, seed=seed)
        for run, rows in ((models, mine(batch)), (references, batch)):
            total = sum(mean_square(model, rows) for model in run)
            total = total + checkpoint(run[0], rows.requires_grad_(), use_reentrant=True).mean()
            total.backward()
        for model, reference in zip(models, references, strict=True):
            assert_same_gradients(model, reference)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_several_models_in_one_backward(run_ranks, transport):
    run_ranks(2, _two_models, transport)


class Deep(nn.Module):
    """A model that may skip its second layer, whose gradient comes first in a backward."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x, whole):
        x = self.first(x)
        return self.second(x) if whole else x


def _models_in_other_orders():
    models = [nn.Linear(8, 8) for _ in range(2)]
    references = copy.deepcopy(models)
    for model in models:
        fully_shard(model, transport="shared_memory")
        model.unshard()  # otherwise forwards gather in their own orders
    batch = batch_of(4, 8)
    in_order = models if dist.get_rank() == 0 else reversed(models)
    sum(mean_square(model, mine(batch)) for model in in_order).backward()
    sum(mean_square(reference, batch) for reference in references).backward()
    for model, reference in zip(models, references, strict=True):
        assert_same_gradients(model, reference)


@pytest.mark.gloo
def test_gradients_of_several_models_may_come_in_other_orders(run_ranks):
    """Messages have to come in one order."""
    run_ranks(2, _models_in_other_orders, timeout=60)


def _narrow(width, transport):
    """Trains with a gradient that is large enough to be sent alone before its cast, not after."""
    torch.manual_seed(0)
    model = Deep(width)
    reference = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    # Backward gathers nothing, since each rank would gather at its own places.
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, transport=transport)
    model.set_reduce_scatter_unused_params(True)
    batch, choices = batch_of(4, width), (True, False)
    mean_square(lambda x: model(x, choices[dist.get_rank()]), mine(batch)).backward()
    loss_of_all(reference, batch, choices).backward()
    assert_same_gradients(model, reference, tolerance=1e-2)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_the_first_gradient_may_be_missing_on_some_ranks(run_ranks, transport):
    run_ranks(2, _narrow, 192, transport, timeout=60)


class Kinds(nn.Module):
    """A model whose gradients come in the order of its parameters, in two dtypes."""

    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.ones(256, 256))
        self.low = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.small = nn.Parameter(torch.ones(8))

    def forward(self, uses_large):
        loss = self.small.sum() + self.low.float().sum()
        return loss + self.large.sum() if uses_large else loss


class Branches(Kinds):
    """A model whose gradients come in a different order on each rank."""

    def forward(self, is_swapped):
        if is_swapped:
            return self.low.float().sum() + self.small.sum()
        return self.small.sum() + self.low.float().sum()


def _branches(transport):
    model = fully_shard(Branches(), transport=transport)
    model(is_swapped=dist.get_rank() == 1).backward()
    assert (model.small.grad.full_tensor() == 1).all()
    assert (model.low.grad.full_tensor() == 1).all()


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_gradients_of_two_dtypes_may_come_in_other_orders(run_ranks, transport):
    run_ranks(2, _branches, transport, timeout=60)


def _kinds(transport):
    model = fully_shard(Kinds(), transport=transport)
    model.set_reduce_scatter_unused_params(True)
    model(uses_large=dist.get_rank() == 1).backward()
    for parameter, expected in zip(model.parameters(), (0.5, 1, 1), strict=True):
        assert (parameter.grad.full_tensor() == expected).all()


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_nothing_waits_for_a_first_gradient_that_is_missing_on_some_ranks(run_ranks, transport):
    run_ranks(2, _kinds, transport, timeout=60)


def _communicating_hooks(transport):
    """Each rank uses another expert, and hooks of all of them communicate."""
    model, _ = sharded(transport=transport)
    norms = {}

    def sum_of_squares(name, parameter):
        total = parameter.grad.to_local().square().sum()
        dist.all_reduce(total)
        norms[name] = total.sqrt().item()

    for name, parameter in model.named_parameters():
        hook = functools.partial(sum_of_squares, name)
        parameter.register_post_accumulate_grad_hook(hook)
    chosen = [(1,), (2,)][dist.get_rank()]
    mean_square(lambda x: model(x, chosen), mine(batch_of(4, 8))).backward()
    assert len(norms) == 8
    for name, norm in gradient_norms(model).items():
        assert norms[name] == pytest.approx(norm)


@either_transport
def test_hooks_run_in_one_order_on_all_ranks(run_ranks, transport):
    run_ranks(2, _communicating_hooks, transport)


def _one_head_now_and_then(transport):
    """Returns the order of hooks in steps of which the first leaves a head out on rank 1."""
    model = fully_shard(TwoHeads(), transport=transport)
    model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_in_backward(model, optimizer, bucket_mb=1e-5)
    order = []
    for name, parameter in model.named_parameters():
        hook = functools.partial(lambda name, _: order.append(name), name)
        parameter.register_post_accumulate_grad_hook(hook)
    for number in range(3):
        left, right = model(mine(batch_of(4, 8)))
        loss = left.square().mean()
        if number or dist.get_rank() == 0:
            loss = loss + right.square().mean()
        loss.backward()
        order.append(number)
    return order


@either_transport
def test_ranks_step_alike_after_a_backward_without_a_gradient(run_ranks, transport):
    first, second = run_ranks(2, _one_head_now_and_then, transport)
    assert first == second
