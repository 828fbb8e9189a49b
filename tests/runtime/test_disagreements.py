"""Ranks that disagree on a gradient in a way that zeros cannot repair: all of them raise."""

import copy
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.experts import Experts, loss_of_all, sharded
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    compiled_each_way,
    in_little_memory,
    mean_square,
    mine,
    shard,
)
from torch import nn
from torch._dynamo.callback import on_compile_end
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepcompile_zero3 import (
    Zero3Error,
    defer_reduction,
    deposit_grad,
    fully_shard,
    record_collectives,
)
from deepcompile_zero3.sharding.module_parameters import parameters_of
from deepcompile_zero3.transport import one_host

TIMEOUT = 4  # seconds; of a group whose ranks disagree


def _disagree(what, transport):
    """Returns each rank's error and seconds; checks that the next step is right."""
    model, reference = sharded(transport=transport)
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
        case "deposited, strict":
            model.set_requires_gradient_on_all_ranks(True)
        case "deposited, frozen":
            weight.requires_grad_(rank != 1)
        case "withheld":
            model.set_requires_gradient_sync(True)
            if rank == 1:
                model.set_requires_gradient_sync(False)
                # a reduced parameter makes this rank take part
                reduced = parameters_of(model.head)["weight"]
                reduced.settings = reduced.settings.replace(requires_gradient_sync=True)
    start = time.monotonic()

    def step():
        if not what.startswith("deposited"):
            mean_square(lambda x: model(x, choice), mine(batch)).backward()
            return
        with defer_reduction(model):
            if rank != 1:
                deposit_grad(weight, torch.ones(weight.shape))

    with pytest.raises(Zero3Error) as raised:
        step()
    seconds = time.monotonic() - start
    assert all(p.grad is None for p in model.parameters())
    weight.requires_grad_(True)
    model.set_requires_gradient_sync(True)
    model.set_requires_gradient_on_all_ranks(what == "strict")
    model.reset_iter_state()
    mean_square(lambda x: model(x, (0, 1)), mine(batch)).backward()
    mean_square(lambda x: reference(x, (0, 1)), batch).backward()
    assert_same_gradients(model, reference)
    return seconds, str(raised.value)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_parameters_frozen_on_one_rank_and_unused_on_another_are_an_error(run_ranks, transport):
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
            "deposited, strict",
            "'experts.0.weight' has a sum that is not reduced yet on rank 0, has no gradient on "
            "rank 1; set_requires_gradient_on_all_ranks(False) lets it count as zero there",
        ),
        (
            "deposited, frozen",
            "'experts.0.weight' has a sum that is not reduced yet on rank 0, is frozen "
            "(requires_grad=False) on rank 1; let all ranks do the same",
        ),
        (
            "withheld",
            "'first.weight' has a gradient on rank 0, is not reduced now "
            "(set_requires_gradient_sync(False), or defer_reduction) on rank 1",
        ),
    ],
)
def test_an_error_of_ranks_that_disagree_names_both_sides(run_ranks, what, message, transport):
    for seconds, told in run_ranks(2, _disagree, what, transport):
        assert message in told
        assert seconds < TIMEOUT


def _thawed_in_the_block(transport):
    model, _ = sharded(transport=transport)
    weight = model.experts[0].weight
    weight.requires_grad_(False)
    with defer_reduction(model):
        weight.requires_grad_(True)
        if dist.get_rank() == 0:
            deposit_grad(weight, torch.ones(8, 8))
    return weight.grad.full_tensor().unique().tolist()


def _frozen_with_a_sum_on_one_rank(transport):
    model, reference = sharded(transport=transport)
    model.set_requires_gradient_sync(False)
    choices, batch = ((0, 1), (1,)), batch_of(12, 8)
    mean_square(lambda x: model(x, choices[dist.get_rank()]), mine(batch)).backward()
    loss_of_all(reference, batch, choices).backward()
    weight = model.experts[0].weight
    weight.requires_grad_(False)
    model.set_requires_gradient_sync(True)
    with defer_reduction(model):
        pass
    assert model.first.weight.grad is not None
    torch.testing.assert_close(weight.grad.full_tensor(), reference.experts[0].weight.grad)
    return weight.requires_grad


def _of_mixed_meshes(transport):
    """One block is sharded over some of the ranks and the others have replicas too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, _ = sharded(transport=transport, mesh=mesh["shard"])
    outer = fully_shard(nn.Sequential(model, nn.Linear(8, 8)), mesh=mesh, transport=transport)
    with defer_reduction(outer):
        if dist.get_rank() == 3:
            deposit_grad(outer[1].weight, torch.ones(8, 8))
        if dist.get_rank() in (1, 3):
            deposit_grad(model.first.weight, torch.ones(8, 8))
    return [outer[1].weight.grad.full_tensor().mean(), model.first.weight.grad.full_tensor().mean()]


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_a_deposit_of_one_rank_arrives_if_others_are_frozen_or_replicated(run_ranks, transport):
    assert run_ranks(2, _thawed_in_the_block, transport) == [[0.5]] * 2
    assert run_ranks(2, _frozen_with_a_sum_on_one_rank, transport) == [False] * 2
    assert run_ranks(4, _of_mixed_meshes, transport) == [[0.25, 0.5]] * 4


def _ends_a_block_beside_a_backward():
    model, _ = sharded(transport="shared_memory")
    loss = mean_square(lambda x: model(x, (0,)), mine(batch_of(12, 8)))

    def deposit():
        with defer_reduction(model):
            deposit_grad(model.first.weight, torch.ones(8, 8))

    with pytest.raises(Zero3Error) as raised:
        (deposit if dist.get_rank() == 0 else loss.backward)()
    return str(raised.value)


@pytest.mark.gloo
def test_the_end_of_a_block_does_not_pass_for_a_backward(run_ranks):
    for told in run_ranks(2, _ends_a_block_beside_a_backward, timeout=60):
        assert "ranks do not reduce the same gradients of the model of 'first.weight'" in told
        assert "parameters at the end of defer_reduction" in told


def _diverge(transport, how):
    """Runs forwards that gather in another order on each rank; returns seconds and the error."""
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


@pytest.mark.parametrize("how", ["eager", pytest.param("interpreted", marks=pytest.mark.more)])
@pytest.mark.gloo
def test_messages_of_other_orders_never_meet(run_apart, how):
    """Ranks wait until the group's timeout."""
    (first, told_first), (second, told_second) = run_apart(_diverge, "c10d", how)
    for told, other in ((told_first, 1), (told_second, 0)):
        assert f"an exchange with rank {other} failed (gather Float " in told
        assert f"experts.{1 - other}.weight" in told
    assert max(first, second) < 2 * TIMEOUT + 10 * (how == "interpreted")  # compiles


@pytest.mark.gloo
def test_forwards_that_gather_in_other_orders_end_at_once(run_apart):
    (first, told_first), (second, told_second) = run_apart(_diverge, "shared_memory", "eager")
    for told in (told_first, told_second):
        assert "ranks wait for each other" in told
    assert "rank 0 waits for rank 1, since it has not begun to gather 'experts.0." in told_first
    assert "rank 1 waits for rank 0, since it has not begun to gather 'experts.1." in told_second
    assert max(first, second) < TIMEOUT / 2


def _other_graphs(how):
    torch.manual_seed(0)
    model, reference = sharded(transport="shared_memory")
    run = compiled(model, how, keep_mb=64)
    batch, choices = batch_of(4, 8), ((0, 1), (1, 0))
    mean_square(lambda x: run(x, choices[dist.get_rank()]), mine(batch)).backward()
    loss_of_all(reference, batch, choices).backward()
    assert_same_gradients(model, reference)


def _circle():
    """Makes each rank wait for the next: rank r gathers expert r first, then the others in turn."""
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


@pytest.mark.gloo
def test_a_circle_of_three_is_an_error_on_all(run_ranks):
    assert max(run_ranks(3, _circle)) < 10


def _many_missing():
    """Deposits more than a mailbox holds of gradients that one rank lacks."""
    torch.manual_seed(0)
    model = Experts(1600)  # experts of 10 MiB
    model.experts.extend(nn.Linear(1600, 1600) for _ in range(8))
    reference = copy.deepcopy(model)
    fully_shard(model, transport="shared_memory")
    batch, choices = batch_of(4, 1600), (tuple(range(12)), (0,))
    mean_square(lambda x: model(x, choices[dist.get_rank()]), mine(batch)).backward()
    loss_of_all(reference, batch, choices).backward()
    assert_same_gradients(model, reference, 1e-4)


@pytest.mark.gloo
def test_more_may_be_missing_than_a_mailbox_holds(run_ranks):
    run_ranks(2, _many_missing)


def _crossing():
    """Runs a backward of two models over crossing groups. Ranks 0 and 3 have more experts than
    their mailboxes hold and wait for ranks 2 and 1 to read them. Ranks 2 and 1 are at the end of
    their backwards and wait for ranks 3 and 0 to send the gradients of the first layer.
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


@pytest.mark.gloo
def test_groups_that_cross_never_wait_in_a_circle(run_ranks):
    run_ranks(4, _crossing, timeout=60)


class Layer(nn.Module):
    """A layer whose forward uses the second weight on request."""

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
    """Fills a rank's mailbox while the other rank waits in a gather of its backward."""
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


@pytest.mark.gloo
def test_a_rank_that_waits_in_a_gather_reads_what_fills_mailboxes(run_ranks):
    run_ranks(2, in_little_memory, _missing_and_gathered_again)


@compiled_each_way
@pytest.mark.gloo
def test_other_orders_within_a_bucket_of_shared_memory_are_right(run_ranks, how):
    run_ranks(2, _other_graphs, how)


def _counted():
    """Returns the collectives of a step in which all ranks have all gradients."""
    model, _ = sharded(transport="c10d")
    with record_collectives() as log:
        mean_square(lambda x: model(x, (0, 1, 2, 3)), batch_of(2, 8)).backward()
    return [c.op for c in log]


def test_messages_beside_tensors_are_no_collectives(run_ranks):
    assert run_ranks(2, _counted) == [["all_gather", "all_gather", "reduce_scatter"]] * 2


def _eager_beside_compiled(in_blocks):
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=3)), "cpu")
    model = Stack()
    model, reference = shard(
        model, model.blocks if in_blocks else (), mesh=mesh, transport="shared_memory"
    )
    run = compiled(model, "eager" if dist.get_rank() == 1 else "interpreted")
    if dist.get_rank() == 0:
        on_compile_end(lambda at: at.callback_trigger.name != "DYNAMO" or dist.barrier())
    else:
        dist.barrier()  # to compile the forward may take longer than the timeout
    batch = batch_of(4, 8)
    if not in_blocks:
        assert_same_step(model, reference, batch, run=run)
        return
    loss = mean_square(run, mine(batch))
    told = "forwards gather more often" if dist.get_rank() == 0 else ""  # rank 1: after the timeout
    with pytest.raises(Zero3Error, match=told):
        loss.backward()


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.gloo
def test_an_eager_rank_beside_a_compiled_one_raises_unless_both_gather_equally_often(
    run_apart, in_blocks
):
    run_apart(_eager_beside_compiled, in_blocks)
