"""Faults of replicas that have parts: each remaining rank gets an error that names what failed."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.faults import LONG, TIMEOUT, let, to_death
from support.models import Stack, batch_of, mean_square, mine
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepcompile_zero3 import fully_shard


def _replica(what, moment, timeout):
    """Trains while rank 1, the other replica, fails; raises the error of rank 0."""
    columns = dist.new_group(timeout=timedelta(seconds=timeout))
    rows = [dist.new_group([rank]) for rank in range(2)]
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    mesh = DeviceMesh.from_group(
        [columns, rows[dist.get_rank()]],
        "cpu",
        mesh=torch.tensor([[0], [1]]),
        mesh_dim_names=("replicate", "shard"),
    )
    model = Stack()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, shard_optimizer_over_replicas=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_hit = dist.get_rank() == 1

    def act():
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "asleep":
            time.sleep(TIMEOUT + 3)

    start = time.monotonic()
    try:
        for step in range(4):
            start = time.monotonic()
            if is_hit and step == 1:
                if moment == "between steps":
                    act()
                else:
                    let(act, moment, model, optimizer)
            mean_square(model, mine(batch_of(4, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        seconds = time.monotonic() - start
        if not is_hit and what == "asleep":
            os.kill(pids[1], signal.SIGKILL)
        raise RuntimeError(f"after {seconds:.2f} s: {type(error).__name__}: {error}") from None


@pytest.mark.thin
@pytest.mark.parametrize(
    ("moment", "told"),
    [
        ("between steps", "changes of 'blocks.0.norm.weight' and 13 more"),
        ("forward", "the gradients of a backward from blocks.0.norm.weight on, 14"),
        ("backward", "reduce_scatter over replicas Float blocks.0.norm.weight"),
        ("optimizer", "changes of 'blocks.0.norm.weight' and 13 more"),
        ("hook", "changes of 'blocks.0.norm.weight' and 13 more"),
    ],
)
@pytest.mark.parametrize("what", ["killed", pytest.param("asleep", marks=pytest.mark.more)])
@pytest.mark.gloo  # collectives say that others have failed, not which
def test_a_replica_that_is_gone_is_named(what, moment, told):
    errors = to_death(_replica, what, moment, TIMEOUT if what == "asleep" else LONG)
    found = re.findall(r"after ([\d.]+) s: (\w+): (.*)", errors)
    assert found, errors
    seconds, kind, message = found[0]
    assert kind == "Zero3Error", errors
    assert float(seconds) < TIMEOUT + 8
    assert f"an exchange with rank 1 failed ({told}" in message


def _by_data(parameter):
    parameter.data.mul_(2)


def _in_place(parameter):
    parameter.mul_(2)


def _to_local(parameter):
    parameter.to_local().add_(1)


def _written_by_one(write):
    """One replica writes to its part: both gather it again."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Stack(depth=1)
    fully_shard(model, mesh=mesh, shard_optimizer_over_replicas=True)
    with torch.no_grad():
        before = model(batch_of(2, 8))
        if dist.get_rank() == 1:
            write(model.head.weight)
        outputs = [model(batch_of(2, 8)) for _ in range(2)]
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], before)
    both = [torch.empty_like(outputs[0]) for _ in range(2)]
    dist.all_gather(both, outputs[0])
    assert torch.equal(*both)


@pytest.mark.parametrize("write", [_by_data, _in_place, _to_local])
def test_a_write_of_one_replica_is_seen_by_all(run_ranks, write):
    run_ranks(2, _written_by_one, write)
