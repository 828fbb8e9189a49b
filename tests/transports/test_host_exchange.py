"""Ranks of one host tell each other numbers and lines, round by round."""

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepcompile_zero3 import Zero3Error
from deepcompile_zero3.runtime import _C


def _exchanges(world_size, pids, name=None):
    """Returns an exchange for each of ``world_size`` ranks, which threads may play."""
    memory = torch.zeros(_C.HostExchange.nbytes(world_size) + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :]
    name = name or dist.group.WORLD.group_name
    names = [f"{10 * rank}" for rank in range(world_size)]  # in the job
    return [
        _C.HostExchange(name, rank, names, pids, memory, "a rule") for rank in range(world_size)
    ]


def test_each_round_has_what_all_ranks_have_told_in_it(one_rank):
    def tell(rank):
        said = [
            exchanges[rank].exchange(2**63 + 10 * turn + rank, f"ä{turn}" * (turn % 3), "here")
            for turn in range(300)
        ]
        for turn, theirs in enumerate(said):
            line = f"ä{turn}" * (turn % 3)
            assert theirs == [(2**63 + 10 * turn + each, line) for each in range(3)]

    exchanges = _exchanges(3, [os.getpid()] * 3)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(tell, range(3)))


def test_the_beginning_of_a_long_line_arrives(one_rank):
    (exchange,) = _exchanges(1, [os.getpid()])
    limit = _C.HostExchange.LINE_BYTES
    assert exchange.exchange(1, "x" * (limit + 5), "here") == [(1, "x" * limit)]


def test_a_rank_that_has_died_is_named_as_in_the_job_with_the_place_and_the_rule(one_rank):
    exchange, _ = _exchanges(2, [os.getpid(), 2**22 + 1])  # no such process
    with pytest.raises(
        Zero3Error, match=r"cannot go on without rank 10 .*dead.* has not come to a place.*a rule"
    ):
        exchange.exchange(0, "", "a place")


def test_a_rank_tells_once_for_whom_it_waits_long(one_rank, capfd):
    group = dist.new_group(timeout=timedelta(seconds=2))
    exchanges = _exchanges(2, [os.getpid()] * 2, group.group_name)
    other = threading.Timer(1.5, exchanges[1].exchange, (5, "", "here"))
    other.start()
    exchanges[0].exchange(4, "", "a place")
    other.join()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "still waits" in line]
    assert re.fullmatch(
        r"zero3: rank 0 still waits for rank 10 \(pid \d+, \w+\): it has not come to a "
        r"place. It does so for up to 2 s",
        line,
    )


def test_ranks_that_wait_let_other_threads_run(one_rank):
    exchanges = _exchanges(2, [os.getpid()] * 2)
    other = threading.Timer(0.05, exchanges[1].exchange, (5, "", "here"))
    other.start()
    assert exchanges[0].exchange(4, "", "here") == [(4, ""), (5, "")]
    other.join()
