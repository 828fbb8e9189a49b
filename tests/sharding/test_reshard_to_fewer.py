"""``reshard_after_forward=n``: from forward to backward, parameters are sharded over n ranks.

Ranks exchange messages: in shared memory, the host's one copy takes no more than n ranks would.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    compiled_each_way,
    each_way,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepcompile_zero3 import fully_shard, record_collectives
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.module_parameters import parameters_of

WIDTH = 10  # rows, which four ranks do not divide evenly


def _train(transport, how):
    """Returns the numbers of ranks in the gathers of forwards and of backwards."""
    model = Stack(WIDTH)
    model, reference = shard(model, [*model.blocks], reshard_after_forward=2, transport=transport)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    in_forward, in_backward = set(), set()
    for seed in range(3):
        batch = batch_of(8, WIDTH, seed=seed)
        with record_collectives() as log:
            loss = mean_square(run, mine(batch))
        in_forward |= {(c.op, c.world_size) for c in log}
        with record_collectives() as log:
            loss.backward()
        in_backward |= {(c.op, c.world_size) for c in log}
        model.zero_grad()
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    return in_forward, in_backward


@each_way
@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
def test_a_backward_gathers_from_neighbors(run_ranks, transport, how):
    from_whom = 2 if transport == "c10d" else 4
    for in_forward, in_backward in run_ranks(4, _train, transport, how):
        assert in_forward == {("all_gather", 4)}
        assert in_backward == {("all_gather", from_whom), ("reduce_scatter", 4)}


def _gathered_in_backward(how, reshard_after_forward):
    mesh = init_device_mesh("cpu", (2, 2))
    model, _ = shard(
        Stack(WIDTH), mesh=mesh, reshard_after_forward=reshard_after_forward, transport="c10d"
    )
    loss = mean_square(compiled(model, how), mine(batch_of(8, WIDTH)))
    with record_collectives() as log:
        loss.backward()
    return {c.world_size for c in log if c.op == "all_gather"}


@compiled_each_way
@pytest.mark.parametrize(("reshard_after_forward", "expected"), [(1, set()), (2, {2})])
def test_one_rank_keeps_it_and_all_are_the_usual_ones(
    run_ranks, reshard_after_forward, expected, how
):
    assert run_ranks(4, _gathered_in_backward, how, reshard_after_forward) == [expected] * 4


def _held(how):
    """Returns the elements that a rank holds between forward and backward, and after."""
    model = Stack(WIDTH)
    model, _ = shard(model, [*model.blocks], reshard_after_forward=2, transport="c10d")
    run = compiled(model, how)
    handles = [p.handle for m in model.modules() for p in parameters_of(m).values()]

    def held_numels():
        return [
            handle.after_forward.shard.numel() if handle.after_forward.shard is not None else 0
            for handle in handles
        ]

    loss = mean_square(run, mine(batch_of(8, WIDTH)))
    between = held_numels()
    loss.backward()
    after = held_numels()
    with torch.no_grad():
        run(mine(batch_of(8, WIDTH)))
    evaluated = held_numels()
    whole = [handle.placeholder.numel() for handle in handles]
    return between, after, evaluated, whole


@pytest.mark.first(how="eager")
@each_way
def test_a_rank_holds_its_part_until_the_backward_ends(run_ranks, how):
    results = run_ranks(4, _held, how)
    for between, after, evaluated, _ in results:
        assert all(between)
        assert not any(after + evaluated)
    whole = results[0][3]
    for left, right in (results[:2], results[2:]):  # two neighbors hold one copy
        assert [a + b for a, b in zip(left[0], right[0], strict=True)] == whole


def _changed_before_backward(how, who_changes):
    """Changes a parameter after a forward; backward gathers the forward's value, as in FSDP2."""
    model, reference = shard(Stack(WIDTH), reshard_after_forward=2, transport="c10d")
    run = compiled(model, how)
    batch = batch_of(8, WIDTH)
    loss = mean_square(run, mine(batch))
    with torch.no_grad():
        for parameter in model.parameters() if dist.get_rank() in who_changes else ():
            parameter.mul_(2.0)
    with record_collectives() as log:
        loss.backward()
    mean_square(reference, batch).backward()
    assert {c.world_size for c in log if c.op == "all_gather"} == {2}
    assert_same_gradients(model, reference)
    if len(who_changes) < 4:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(2.0)
    for each in (model, reference):
        each.zero_grad()
    assert_same_step(model, reference, batch, run=run)
    for each in (model, reference):
        each.zero_grad()
    model.set_reshard_after_forward(True)
    assert_same_step(model, reference, batch, run=run)
    with record_collectives() as log:
        mean_square(run, mine(batch)).backward()
    assert {c.world_size for c in log} == {4}


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("who_changes", [(1,), (0, 1, 2, 3)], ids=["one rank", "all ranks"])
def test_a_backward_gathers_from_the_same_ranks_whatever_has_changed_where(
    run_ranks, how, who_changes
):
    run_ranks(4, _changed_before_backward, how, who_changes, timeout=60)


def _refused():
    for value in (0, 3, 8, -2, 2.0, "two"):
        model = Stack()
        with pytest.raises(ValueError, match=r"a divisor of the number of ranks .*, 4; got"):
            fully_shard(model, reshard_after_forward=value)
        assert type(model) is Stack


def test_a_number_that_does_not_divide_the_ranks_is_refused(run_ranks):
    run_ranks(4, _refused)


def _timeouts():
    """Returns the timeouts of the groups that are made for a mesh with its own group."""
    group = dist.new_group(timeout=timedelta(seconds=37))
    model = Stack()
    fully_shard(
        model,
        mesh=DeviceMesh.from_group(group, "cpu"),
        reshard_after_forward=2,
        transport="c10d",
    )
    handle = parameters_of(model.head)["weight"].handle
    transport, there = handle.transport, handle.after_forward.transport
    channels = transport.gathers, transport.reductions, there.gathers
    return [_C.timeout_of(channel.name) for channel in channels]


def test_groups_of_our_own_wait_no_longer_than_the_users(run_ranks):
    assert run_ranks(4, _timeouts) == [[37_000] * 3] * 4
