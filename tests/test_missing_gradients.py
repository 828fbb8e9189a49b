"""Gradients that only some ranks have: they count as zero on the others, or all ranks are told."""

import copy
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import (
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    compiled_each_way,
    each_way,
    in_little_memory,
    mean_square,
    mine,
    optimizers_of,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import (
    MixedPrecisionPolicy,
    Zero3Error,
    fully_shard,
    record_collectives,
)
from deepcompile_zero3.sharding.module import parameters_of
from deepcompile_zero3.transport import one_host

TIMEOUT = 4  # seconds, of a group whose ranks disagree


class Experts(nn.Module):
    """Of its experts, a forward uses those that it is told."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, width)

    def forward(self, x, chosen):
        x = self.first(x)
        for index in chosen:
            x = x + self.experts[index](x)
        return self.head(x)


def _sharded(width=8, **settings):
    torch.manual_seed(0)
    model = Experts(width)
    return fully_shard(copy.deepcopy(model), **settings), model


def _loss_of_all(reference, batch, choices):
    """The mean of the ranks' losses, each of its rows and with its choice."""
    parts = zip(batch.chunk(len(choices)), choices, strict=True)
    return sum(mean_square(lambda x, c=c: reference(x, c), rows) for rows, c in parts) / len(
        choices
    )


# What each of two or four ranks uses in a step; nobody ever uses the last expert.
TWO = [((0, 1), (1,)), ((), (2, 0)), ((2,), (2,)), ((0,), ())]
THREE = [((0,), (1,), ()), ((0, 1, 2), (), (1, 2)), ((), (2,), ()), ((1,), (1,), (0, 2))]
FOUR = [((0,), (0,), (1,), ()), ((), (), (0, 2), (2, 0)), ((1,), (), (), ()), ((), (), (), ())]


def _train(steps, width, transport, micro_batches, mesh_shape, bucket_bytes=64 << 20):
    mesh = init_device_mesh("cpu", mesh_shape)
    model, reference = _sharded(width, transport=transport, mesh=mesh)
    for module in model.modules():
        for parameter in parameters_of(module).values():
            parameter.handle.bucket_bytes = bucket_bytes
    optimizers = optimizers_of(model, reference)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(0, len(steps), micro_batches):
        for index in range(step, step + micro_batches):
            choices = steps[index]
            batch = batch_of(2 * world_size, width, seed=index)
            model.set_requires_gradient_sync(index == step + micro_batches - 1)
            mean_square(lambda x, c=choices[rank]: model(x, c), mine(batch)).backward()
            _loss_of_all(reference, batch, choices).backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
    assert model.experts[3].weight.grad is None


@pytest.mark.thin
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize("width", [8, 256])  # that travel together, and alone
def test_experts_that_some_ranks_use_are_trained(run_ranks, width, transport, micro_batches):
    run_ranks(2, _train, TWO, width, transport, micro_batches, (2,))


@pytest.mark.parametrize("width", [8, 150, 256])
def test_no_bucket_waits_for_what_some_ranks_have(run_ranks, width):
    """Each gradient fills one, and waits for the one before."""
    run_ranks(2, _train, TWO, width, "c10d", 1, (2,), 4 * width)
    run_ranks(3, _train, THREE, width, "c10d", 2, (3,), 4 * width)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_experts_that_some_replicas_use_are_trained(run_ranks, transport, micro_batches):
    run_ranks(4, _train, FOUR, 8, transport, micro_batches, (2, 2))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.body(x).tanh()
        return self.left(x), self.right(x)


def _one_loss(transport, how):
    """Only the first rank's loss takes the right head into account."""
    torch.manual_seed(0)
    model = TwoHeads()
    reference = copy.deepcopy(model)
    fully_shard(model, transport=transport)
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
    """Of one large parameter each: a call of ranks is pending when the next one begins."""
    torch.manual_seed(0)
    models = [nn.Linear(256, 256, bias=False) for _ in range(3)]
    references = copy.deepcopy(models)
    for model in models:
        fully_shard(model, transport=transport)
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
    """Whose second layer is left out at times. A gradient of it is the first of a backward."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x, whole):
        x = self.first(x)
        return self.second(x) if whole else x


def _models_in_other_orders():
    models = [fully_shard(nn.Linear(8, 8), transport="shared_memory") for _ in range(2)]
    for model in models:
        model.unshard()  # so that forwards do not gather, in orders of their own
    x = batch_of(2, 8)
    in_order = models if dist.get_rank() == 0 else reversed(models)
    loss = sum(mean_square(model, x) for model in in_order)
    with pytest.raises(Zero3Error) as raised:
        loss.backward()
    return str(raised.value)


def test_models_of_one_backward_in_other_orders_are_told(run_ranks):
    for rank, told in enumerate(run_ranks(2, _models_in_other_orders)):
        names = ("Linear:2.weight", "weight")
        here, there = names if rank == 0 else names[::-1]
        assert f"to that of '{here}' on rank {rank}, and to that of '{there}'" in told


def _narrow(width, transport):
    """A gradient that is large enough to travel alone before it is cast, and not after."""
    torch.manual_seed(0)
    model = Deep(width)
    reference = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    # Backward gathers nothing, which ranks would do at places of their own.
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, transport=transport)
    batch, choices = batch_of(4, width), (True, False)
    mean_square(lambda x: model(x, choices[dist.get_rank()]), mine(batch)).backward()
    _loss_of_all(reference, batch, choices).backward()
    assert_same_gradients(model, reference, tolerance=1e-2)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_the_first_gradient_may_be_missing_on_some_ranks(run_ranks, transport):
    run_ranks(2, _narrow, 192, transport, timeout=60)


class Kinds(nn.Module):
    """Gradients come in the order in which it has its parameters, in two dtypes."""

    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.ones(256, 256))
        self.low = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.small = nn.Parameter(torch.ones(8))

    def forward(self, uses_large):
        loss = self.small.sum() + self.low.float().sum()
        return loss + self.large.sum() if uses_large else loss


class Branches(Kinds):
    """Gradients come in an order of each rank's own."""

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
    model(uses_large=dist.get_rank() == 1).backward()
    for parameter, expected in zip(model.parameters(), (0.5, 1, 1), strict=True):
        assert (parameter.grad.full_tensor() == expected).all()


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_nothing_waits_for_a_first_gradient_that_is_missing_on_some_ranks(run_ranks, transport):
    run_ranks(2, _kinds, transport, timeout=60)


# ---- what all ranks are told


def _disagree(what, transport):
    """What each rank is told, and how long that takes; the step after it is right."""
    model, reference = _sharded(transport=transport)
    batch = batch_of(12, 8)
    choice = (0, 1)
    rank = dist.get_rank()
    weight = model.experts[0].weight
    match what:
        case "frozen":
            weight.requires_grad_(rank != 1)
        case "frozen, and unused":
            weight.requires_grad_(rank != 1)
            choice = (0, 1) if rank == 2 else (1,)
        case "strict":
            model.set_requires_gradient_on_all_ranks(True)
            choice = (0, 1) if rank != 1 else (1,)
        case "withheld":
            model.set_requires_gradient_sync(True)
            if rank == 1:
                model.set_requires_gradient_sync(False)
                # a parameter that is reduced, so that this rank takes part
                parameters_of(model.head)["weight"].handle.requires_gradient_sync = True
    start = time.monotonic()
    with pytest.raises(Zero3Error) as raised:
        mean_square(lambda x: model(x, choice), mine(batch)).backward()
    seconds = time.monotonic() - start
    assert all(p.grad is None for p in model.parameters())
    weight.requires_grad_(True)
    model.set_requires_gradient_sync(True)
    model.reset_iter_state()
    mean_square(lambda x: model(x, (0, 1)), mine(batch)).backward()
    mean_square(lambda x: reference(x, (0, 1)), batch).backward()
    assert_same_gradients(model, reference)
    return seconds, str(raised.value)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_what_is_frozen_on_one_rank_and_unused_on_another_is_told(run_ranks, transport):
    for seconds, told in run_ranks(3, _disagree, "frozen, and unused", transport):
        assert "'experts.0.weight' has a gradient on rank 2, has no gradient on rank 0, is " in told
        assert seconds < TIMEOUT


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "frozen",
            "'experts.0.weight' has a gradient on rank 0, is frozen (requires_grad=False) on "
            "rank 1; let all ranks do the same",
        ),
        (
            "strict",
            "'experts.0.weight' has a gradient on rank 0, has no gradient on rank 1; "
            "set_requires_gradient_on_all_ranks(False) lets it count as zero there",
        ),
        (
            "withheld",
            "'first.weight' has a gradient on rank 0, is not reduced now "
            "(set_requires_gradient_sync(False), or defer_reduction) on rank 1",
        ),
    ],
)
def test_ranks_that_disagree_are_told_both_sides(run_ranks, what, message, transport):
    for seconds, told in run_ranks(2, _disagree, what, transport):
        assert message in told
        assert seconds < TIMEOUT


def _diverge(transport, how):
    """Ranks whose forwards gather different things, in groups of their own."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    model = Experts(8)
    mesh = DeviceMesh.from_group(group, "cpu")
    for expert in model.experts:
        fully_shard(expert, mesh=mesh, transport=transport)
    fully_shard(model, mesh=mesh, transport=transport)
    run = compiled(model, how, keep_mb=64)
    choice = ((0, 1), (1, 0))[dist.get_rank()]
    start = time.monotonic()
    with pytest.raises(Zero3Error) as raised:
        mean_square(lambda x: run(x, choice), batch_of(2, 8)).backward()
    return time.monotonic() - start, str(raised.value)


@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_messages_of_other_orders_never_meet(run_apart, how):
    """Until the group's time is over."""
    (first, told_first), (second, told_second) = run_apart(_diverge, "c10d", how)
    for told, other in ((told_first, 1), (told_second, 0)):
        assert f"an exchange with rank {other} failed (gather Float " in told
        assert f"experts.{1 - other}.weight" in told
    assert max(first, second) < 2 * TIMEOUT + 10 * (how == "interpreted")  # it compiles


def test_forwards_that_gather_in_other_orders_end_at_once(run_apart):
    (first, told_first), (second, told_second) = run_apart(_diverge, "shared_memory", "eager")
    for told in (told_first, told_second):
        assert "ranks wait for each other" in told
    assert "rank 0 waits for rank 1, since it has not begun to gather 'experts.0." in told_first
    assert "rank 1 waits for rank 0, since it has not begun to gather 'experts.1." in told_second
    assert max(first, second) < TIMEOUT / 2


def _other_graphs(how):
    torch.manual_seed(0)
    model, reference = _sharded(transport="shared_memory")
    run = compiled(model, how, keep_mb=64)
    batch, choices = batch_of(4, 8), ((0, 1), (1, 0))
    mean_square(lambda x: run(x, choices[dist.get_rank()]), mine(batch)).backward()
    _loss_of_all(reference, batch, choices).backward()
    assert_same_gradients(model, reference)


def _circle():
    """Each waits for the next: rank r gathers expert r first, and then the others, in turn."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = Experts(8)
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*model.experts, model):
        fully_shard(module, mesh=mesh, transport="shared_memory")
    rank = dist.get_rank()
    start = time.monotonic()
    with pytest.raises(Zero3Error, match="ranks wait for each other"):
        model(batch_of(2, 8), (rank, (rank + 1) % 3, (rank + 2) % 3))
    return time.monotonic() - start


def test_a_circle_of_three_is_told_to_all(run_ranks):
    assert max(run_ranks(3, _circle)) < 10


def _many_missing():
    """More than a mailbox holds, of what one rank has not."""
    torch.manual_seed(0)
    model = Experts(1600)  # experts of 10 MiB
    model.experts.extend(nn.Linear(1600, 1600) for _ in range(8))
    reference = copy.deepcopy(model)
    fully_shard(model, transport="shared_memory")
    batch, choices = batch_of(4, 1600), (tuple(range(12)), (0,))
    mean_square(lambda x: model(x, choices[dist.get_rank()]), mine(batch)).backward()
    _loss_of_all(reference, batch, choices).backward()
    assert_same_gradients(model, reference, 1e-4)


def test_more_may_be_missing_than_a_mailbox_holds(run_ranks):
    run_ranks(2, _many_missing)


def _crossing():
    """Two models of a backward, over groups that cross. Ranks 0 and 3 have more experts than their
    mailbox holds, and wait for 2 and 1 to read them; those have come to the end, and wait there for
    3 and 0 to send the first layer's.
    """
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("columns", "rows"))
    first, experts = nn.Linear(64, 64), Experts(64)
    experts.experts.extend(nn.Linear(64, 64) for _ in range(8))
    wholes = copy.deepcopy((first, experts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_host, "MAILBOX_BYTES", 0)
        fully_shard(first, mesh=mesh["rows"], transport="shared_memory")
        fully_shard(experts, mesh=mesh["columns"], transport="shared_memory")
    rank = dist.get_rank()
    x, chosen = batch_of(4, 64, seed=rank), range(12) if rank in (0, 3) else ()
    mean_square(lambda x: experts(first(x), chosen), x).backward()
    mean_square(lambda x: wholes[1](wholes[0](x), chosen), x).backward()
    for model, whole, name in zip((first, experts), wholes, ("rows", "columns"), strict=True):
        for parameter in whole.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=mesh[name].get_group())
            parameter.grad /= 2
        assert_same_gradients(model, whole)


def test_groups_that_cross_never_wait_in_a_circle(run_ranks):
    run_ranks(4, _crossing, timeout=60)


class Layer(nn.Module):
    """Of its weights, a forward uses the second where it is told."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x, both):
        return torch.tanh(self.first(x) + self.second(x) if both else self.first(x))


class Layers(nn.ModuleList):
    def forward(self, x, both):
        for layer in self:
            x = layer(x, both)
        return x


def _missing_and_gathered_again():
    """A rank's mailbox is full, and the other waits in a gather of its backward."""
    torch.manual_seed(0)
    reference = Layers(Layer(1024) for _ in range(16))
    model = copy.deepcopy(reference)
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=True, transport="shared_memory")
    batch = batch_of(4, 1024)
    mean_square(lambda x: model(x, both=dist.get_rank() == 1), mine(batch)).backward()
    parts = zip(batch.chunk(2), (False, True), strict=True)
    sum(mean_square(lambda x, b=b: reference(x, b), x) / 2 for x, b in parts).backward()
    assert_same_gradients(model, reference, 1e-4)


def test_a_rank_that_waits_in_a_gather_reads_what_fills_mailboxes(run_ranks):
    run_ranks(2, in_little_memory, _missing_and_gathered_again)


@compiled_each_way
def test_other_orders_within_a_bucket_of_shared_memory_are_right(run_ranks, how):
    run_ranks(2, _other_graphs, how)


def _counted():
    """Collectives of a step in which all ranks have all gradients."""
    model, _ = _sharded(transport="c10d")
    with record_collectives() as log:
        mean_square(lambda x: model(x, (0, 1, 2, 3)), batch_of(2, 8)).backward()
    return [c.op for c in log]


def test_what_ranks_tell_each_other_is_no_collective(run_ranks):
    assert run_ranks(2, _counted) == [["all_gather", "all_gather", "reduce_scatter"]] * 2
