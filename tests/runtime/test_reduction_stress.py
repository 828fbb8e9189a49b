"""Ten thousand random backwards: each gradient is the exact mean over ranks, or all ranks raise."""

import random
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.random_backwards import check, draw, random_backwards, sharded
from torch.distributed.device_mesh import DeviceMesh

from deepcompile_zero3 import Zero3Error

BACKWARDS = 5000  # for each transport
TIMEOUT = 3  # seconds; of a group with a rank that stops

each_transport = pytest.mark.parametrize("transport", ["shared_memory", "c10d"])


@pytest.mark.first(transport="shared_memory")
@pytest.mark.parametrize("count", [BACKWARDS // 5, pytest.param(BACKWARDS, marks=pytest.mark.long)])
@each_transport
def test_random_backwards_give_exact_means(run_ranks, transport, count):
    raised = run_ranks(2, random_backwards, transport, count, timeout=200)
    assert raised[0] == raised[1] > count / 50


def _stalled(transport, seed):
    """Stops rank 1 in the middle of a backward; returns the other rank's wait and error."""
    drawn = random.Random(seed)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    model = sharded(drawn, transport=transport, mesh=DeviceMesh.from_group(group, "cpu"))
    for _ in range(drawn.randrange(5)):
        terms = draw(drawn, model, raises=False)
        model(terms[dist.get_rank()]).backward()
        check(model, terms)
    [*_, last] = terms = draw(drawn, model, raises=False)
    if dist.get_rank() == 1:
        last.insert(drawn.randrange(len(last) + 1), (None, lambda: time.sleep(2 * TIMEOUT)))
    start = time.monotonic()
    told = None
    try:
        model(terms[dist.get_rank()]).backward()
    except Zero3Error as error:
        told = str(error)
    return time.monotonic() - start, told


@pytest.mark.first(transport="shared_memory")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@each_transport
@pytest.mark.gloo
def test_a_rank_that_stops_is_reported_in_time(run_apart, transport, seed):
    # Rank 1 may find all that it needs when it continues.
    (seconds, told), _ = run_apart(_stalled, transport, seed)
    assert "rank 1" in told
    assert seconds < 2 * TIMEOUT
