"""Faults of two hosts: a link that is cut, slow or away for a while, hosts and ranks that are gone.

Hosts are network namespaces of this machine, so these tests need root and iproute2. All process
groups of a job and its store are over the link. ``docs/hosts.md`` says what each fault looks like.
"""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.faults import LONG, TIMEOUT, let, to_death
from support.hosts import Place
from support.models import (
    Stack,
    assert_same_parameters,
    batch_of,
    mean_square,
    mine,
    optimizers_of,
    shard,
    step,
)
from support.ranks import RankPool

from bench import link

SLACK = 6  # seconds; for a busy machine


@pytest.fixture
def hosts():
    """The names of two hosts with a link between them."""
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(link.linked_hosts("1gbit"))
        except link.NoHostsError as error:
            pytest.skip(str(error))
        yield names


class _Saved:
    """A part of a checkpoint that lets something happen when it is saved."""

    def __init__(self, act):
        self._act = act

    def state_dict(self):
        self._act()
        return {"step": torch.tensor(1)}

    def load_state_dict(self, state):
        pass


def _meet(hosts, layout, moment, what, seconds, folder):
    """Trains until the fault. Writes this rank's error, with the seconds since the step began, to a
    file in ``folder``, and ends the process.

    The last rank makes the fault, at a moment of its second step or before it trains.
    """
    place = Place(hosts)
    is_last = place.rank == place.world_size - 1

    def act():
        match what:
            case "link":
                link.set_link(place.host, "down")
            case "crawl":
                link.set_rate(place.host, "1kbit", patience="60s", burst="2kb")
            case "rank":
                os.kill(os.getpid(), signal.SIGKILL)
            case "host" | "sleep":
                for pid in place.pids_of_last_host:  # this process comes last
                    os.kill(pid, signal.SIGKILL if what == "host" else signal.SIGSTOP)

    def act_at(this):
        if is_last and moment == this:
            act()

    start = time.monotonic()
    try:
        act_at("init_process_group")
        place.join(seconds)
        settings = place.settings_of(layout, seconds)
        start = time.monotonic()
        act_at("fully_shard")
        model = Stack()
        shard(model, model.blocks, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            start = time.monotonic()
            if number == 1:
                act_at("between steps")
                if is_last:
                    let(act, moment, model, optimizer)
                if moment == "save":
                    saved = _Saved(lambda: act_at("save"))
                    state = {"model": model.state_dict(), "saved": saved}
                    dcp.save(state, checkpoint_id=f"{folder}/saved")
            mean_square(model, mine(batch_of(4, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()
    except BaseException as error:  # torch's CheckpointException is no Exception
        waited = time.monotonic() - start
        if what == "sleep":
            for pid in place.pids_of_last_host:
                os.kill(pid, signal.SIGKILL)  # otherwise the pool waits for them
        message = f"{type(error).__name__}: {error}"
        Path(folder, str(place.rank)).write_text(json.dumps([waited, message]))
        os._exit(1)


def _told(hosts, layout, moment, what, seconds, folder, ranks=2):
    """Returns the seconds and the message of each rank that tells an error, by rank."""
    said = to_death(_meet, hosts, layout, moment, what, seconds, str(folder), world_size=ranks)
    told = {int(file.name): json.loads(file.read_text()) for file in folder.glob("[0-9]")}
    print({rank: waited for rank, (waited, _) in told.items()}, said)
    return told


_NAMED = re.compile(
    r"Zero3Error: zero3: (an exchange with rank \d \(host zero3-.*\) failed \(.*(blocks|head)\.|"
    r"cannot go on without rank \d \(pid \d+, dead\).*'(blocks|head)\.|"
    r"a backward has ended on rank \d without a gradient of '(blocks|head)\.)"
)


# The exchange that the ranks wait for, by layout and moment.
EXCHANGES = {
    ("flat", "between steps"): "gather Float blocks.0.norm.weight",
    ("flat", "forward"): "the gradients of a backward from blocks.0.norm.weight on",
    ("replicas", "between steps"): "the gradients of a backward from blocks.0.norm.weight on",
    ("replicas", "backward"): "all_reduce over replicas Float blocks.0.norm.weight",
    ("parts", "between steps"): "changes of 'blocks.0.norm.weight' and 13 more",
    ("parts", "backward"): "reduce_scatter over replicas Float blocks.0.norm.weight",
}


@pytest.mark.long
@pytest.mark.parametrize(("layout", "moment"), EXCHANGES)
def test_a_cut_link_is_told_on_both_sides(hosts, layout, moment, tmp_path):
    told = _told(hosts, layout, moment, "link", TIMEOUT, tmp_path)
    assert {*told} == {0, 1}
    for rank, (waited, message) in told.items():
        assert waited < TIMEOUT + SLACK
        other = f"rank {1 - rank} (host {hosts[1 - rank]})"
        assert f"an exchange with {other} failed ({EXCHANGES[layout, moment]}" in message


@pytest.mark.long
def test_an_exchange_that_takes_a_slow_link_longer_than_the_timeout_is_told(hosts, tmp_path):
    told = _told(hosts, "parts", "backward", "crawl", TIMEOUT, tmp_path)
    assert {*told} == {0, 1}
    assert all(waited < TIMEOUT + SLACK for waited, _ in told.values())
    assert _NAMED.match(told[0][1])


# What ranks 0 and 1 are told, by moment: by torch, or by all ranks' exchange in fully_shard.
OUTSIDE_OF_STEPS = {
    "init_process_group": ["waiting for clients. 1/2 clients joined", "(10.213.0.1, 29500)"],
    "fully_shard": ["fully_shard: arguments: ranks [0, 1] could not tell each other"] * 2,
    "save": ["Timed out waiting"] * 2,
}


@pytest.mark.long
@pytest.mark.parametrize("moment", OUTSIDE_OF_STEPS)
def test_a_link_that_is_cut_outside_of_steps_is_told_on_both_sides(hosts, moment, tmp_path):
    told = _told(hosts, "parts", moment, "link", TIMEOUT, tmp_path)
    assert {*told} == {0, 1}
    for rank, (waited, message) in told.items():
        assert waited < TIMEOUT + SLACK
        assert OUTSIDE_OF_STEPS[moment][rank] in message
    assert not (tmp_path / "saved" / ".metadata").exists()  # no half checkpoint is loaded


@pytest.mark.parametrize(
    ("layout", "moment", "ranks"),
    [
        pytest.param("flat", "forward", 2, marks=pytest.mark.more),
        pytest.param("replicas", "optimizer", 4, marks=pytest.mark.long),
        pytest.param("parts", "backward", 4, marks=pytest.mark.long),
    ],
)
def test_a_host_that_is_killed_is_missed_at_once(hosts, layout, moment, ranks, tmp_path):
    told = _told(hosts, layout, moment, "host", LONG, tmp_path, ranks)
    assert {*told} == {*range(ranks // 2)}
    assert all(waited < SLACK and _NAMED.match(message) for waited, message in told.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "moment", "ranks"),
    [("flat", "backward", 2), ("replicas", "forward", 2), ("parts", "forward", 2)],
)
def test_a_host_that_sleeps_is_missed_in_time(hosts, layout, moment, ranks, tmp_path):
    told = _told(hosts, layout, moment, "sleep", TIMEOUT, tmp_path, ranks)
    assert {*told} == {*range(ranks // 2)}
    for waited, message in told.values():
        assert TIMEOUT - 0.5 <= waited < TIMEOUT + SLACK
        assert _NAMED.match(message)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "moment"), [("replicas", "forward"), ("parts", "backward")])
def test_a_rank_that_is_killed_is_missed_on_both_hosts(hosts, layout, moment, tmp_path):
    told = _told(hosts, layout, moment, "rank", LONG, tmp_path, ranks=4)
    assert {*told} == {0, 1, 2}
    assert all(waited < SLACK and _NAMED.match(message) for waited, message in told.values())
    assert f"an exchange with rank 3 (host {hosts[1]}) failed" in told[1][1]  # over replicas
    assert re.search(r"rank 3 \(pid \d+, dead\): ", told[2][1])  # which shares memory with it


# ---- what is no fault


def _go_on(hosts, layout, trouble, seconds):
    """Takes steps, the second over a link with some trouble; returns how long that one takes."""
    place = Place(hosts)
    place.join(seconds)
    model = Stack()
    model, reference = shard(model, model.blocks, **place.settings_of(layout, seconds))
    optimizers = optimizers_of(model, reference)
    batch = batch_of(4, 8)
    for is_troubled in (False, True, False):
        begin = time.monotonic()
        if is_troubled:
            trouble(place)
        mean_square(model, mine(batch)).backward()
        mean_square(reference, batch).backward()
        step(optimizers)
        if is_troubled:
            took = time.monotonic() - begin
            link.set_rate(place.host, "1gbit", patience="50ms")
    assert_same_parameters(model, reference)
    return took


def _slow(place):
    link.set_rate(place.host, "10kbit", patience="20s", burst="2kb")


def _away(place):
    if place.rank == place.world_size - 1:
        link.set_link(place.host, "down")
        time.sleep(1)
        link.set_link(place.host, "up")


@pytest.mark.parametrize(
    ("layout", "trouble", "seconds"),
    [
        pytest.param("flat", _slow, TIMEOUT, marks=pytest.mark.long),
        pytest.param("parts", _slow, TIMEOUT, marks=pytest.mark.long),
        pytest.param("replicas", _away, 3 * TIMEOUT, marks=pytest.mark.more),
        pytest.param("parts", _away, 3 * TIMEOUT, marks=pytest.mark.long),
    ],
)
def test_a_link_that_is_slow_or_away_for_less_than_the_timeout_is_waited_for(
    hosts, layout, trouble, seconds
):
    pool = RankPool(2)
    try:
        took = pool.run(_go_on, hosts, layout, trouble, seconds, timeout=60)
    finally:
        pool.close()
    print(took)
    if trouble is _slow:
        assert min(took) > 1  # without the trouble a step takes a tenth of this
