"""Ranks of one host read the right data and finish, in whatever order their steps run.

The model ``one_host_model.py`` tries all orders.
"""

from functools import partial

import pytest
from support.interleavings import ProtocolError, explore
from support.one_host_model import Rank
from support.rank_waiter_model import Sleeper


def gathered(rank, *buckets, ahead=1, in_backward=False):
    """Yields each parameter once it is gathered; ``ahead`` later buckets are under way."""
    started = 0
    for i, bucket in enumerate(buckets):
        for later in buckets[started : i + ahead + 1]:
            rank.start(*later, in_backward=in_backward)
            started += 1
        rank.wait(*bucket)
        yield from bucket


def forward(rank, *parameters):
    """Gathers each parameter while the next is under way, and reads it twice."""
    for p in gathered(rank, *((p,) for p in parameters)):
        rank.read(p)
        rank.read(p)


def backward(rank, *parameters, gradient):
    """Reads each parameter that forward gathered, and reduces its gradient."""
    number = rank.begin()
    for i, p in enumerate(parameters):
        rank.read(p)
        rank.post(p, number, gradient + i)
    rank.finish(number)
    rank.end(number)


def evaluation(rank, forwards, parameters=(0,)):
    """Runs forwards that each publish new values, as after load_state_dict."""
    for _ in range(forwards):
        forward(rank, *parameters)


def buckets(rank, forwards):
    for _ in range(forwards):
        rank.start(0, 1)
        rank.wait(0, 1)
        rank.read(1)
        rank.read(0)


def training(rank, steps):
    for step in range(steps):
        forward(rank, 0, 1)
        backward(rank, 1, 0, gradient=10 * step + 1)


def accumulation(rank, backwards):
    """Runs backwards without forwards in between, each with two gradients of one parameter."""
    for i in range(backwards):
        backward(rank, 0, 0, gradient=10 * i + 1)


def nested(rank):
    """Runs a backward inside another, as in activation checkpointing, and a backward after it."""
    outer = rank.begin()
    rank.post(0, outer, gradient=1)
    inner = rank.begin()
    rank.post(1, inner, gradient=2)
    rank.post(0, inner, gradient=3)
    rank.finish(inner)
    rank.end(inner)
    rank.post(0, outer, gradient=4)
    rank.finish(outer)
    rank.end(outer)
    backward(rank, 1, 0, gradient=10)


def in_turns(rank, buckets, ahead=1, steps=1):
    """Runs forwards that gather more than there is room for, and backwards that gather again."""
    for step in range(steps):
        for p in gathered(rank, *buckets, ahead=ahead):
            rank.read(p)
        number = rank.begin()
        rank.read(0)  # forward has kept the parameter
        again = [bucket[::-1] for bucket in reversed(buckets)]
        for p in gathered(rank, *again, ahead=ahead, in_backward=True):
            rank.read(p)
            rank.post(p, number, gradient=10 * step + p + 1)
        rank.finish(number)
        rank.end(number)


def abandoning(rank, backward_between=False):
    """Runs a forward that raises after it has started a gather, which stays pinned. Another forward
    follows or, before it, a backward of the first forward.
    """
    forward(rank, 0, 1)
    rank.start(0, 1)
    if backward_between:
        for p in gathered(rank, (1,), (2,), (0,), in_backward=True):
            rank.read(p)
    forward(rank, 1, 2, 0)


def diverging(rank, started=0):
    """Runs a forward that raises, on rank 0 after ``started`` gathers, and another forward."""
    for p in (0, 1)[: started if rank.rank == 0 else None]:
        rank.start(p)
    for p in gathered(rank, (2,), (2,), (0,), (1,), ahead=0):
        rank.read(p)
        rank.read(p)


ALL = None  # the count of a rank whose backward does not raise


def raising(rank, counts, forward_between=True):
    """Runs a backward that raises on each rank after ``counts`` gradients, and another backward.

    A backward that raises before its first gradient has not begun; the next forward makes up for
    that.
    """
    forward(rank, 0)
    count = counts[rank.rank]
    if count != 0 or not forward_between:
        number = rank.begin()
        for p in (0, 1)[:count]:
            rank.post(p, number, p + 1, raises=count is not ALL)
        if count is ALL:
            rank.finish(number)
        else:
            rank.drop()
        rank.end(number)
    if forward_between:
        forward(rank, 0)
    backward(rank, 0, 1, gradient=10)


def telling(rank, raises=None):
    """Runs backwards that begin with announcements. The first backward has another inside, before
    which its own announcements are read. If ``raises``, rank 1 raises in the first backward, before
    or after it announces, and the other ranks raise after they have read the announcements.
    """
    forward(rank, 0)
    number = rank.begin()
    if raises is None:
        round = rank.announce(number, what=1)
        rank.post(0, number, gradient=1)
        rank.read_announcements(round, what=1)
        inner = rank.begin()
        rank.read_announcements(rank.announce(inner, what=2), what=2)
        rank.post(0, inner, gradient=2)
        rank.finish(inner)
        rank.end(inner)
        rank.finish(number)
    elif rank.rank != 1:
        round = rank.announce(number, what=1)
        rank.read_announcements(round, what=1)
    elif raises == "after it announces":
        rank.acknowledge(rank.announce(number, what=1))
    rank.end(number)
    if raises is not None:
        forward(rank, 0)
    for gradient in (3, 4):
        number = rank.begin()
        rank.read_announcements(rank.announce(number, what=gradient), what=gradient)
        rank.post(0, number, gradient=gradient)
        rank.finish(number)
        rank.end(number)


def waiting_in_another_order(rank):
    rank.start(0)
    rank.start(1)
    for p in (0, 1) if rank.rank == 0 else (1, 0):
        rank.wait(p)


def states_of(program, world_size, **options):
    """Returns the number of states that the ranks can reach."""
    ranks = [Rank(rank, world_size, **options) for rank in range(world_size)]
    for rank in ranks:
        program(rank)
    return explore(ranks)


def states_of_sleepers(world_size, rounds, order=""):
    ranks = [Sleeper(rank, world_size, order) for rank in range(world_size)]
    for rank in ranks:
        for value in range(1, rounds + 1):
            rank.store("word", 0, value)
            rank.notify()
            rank.wait(value)
    return explore(ranks)


@pytest.mark.parametrize(
    ("program", "world_size", "options"),
    [
        (partial(evaluation, forwards=4), 2, {}),
        (partial(evaluation, forwards=4), 3, {}),
        (partial(evaluation, forwards=3, parameters=(0, 1)), 2, {"parameters": 2}),
        (partial(evaluation, forwards=2, parameters=(0, 1)), 3, {"parameters": 2}),
        (partial(buckets, forwards=3), 2, {"parameters": 2}),
        (partial(buckets, forwards=2), 3, {"parameters": 2}),
    ],
)
def test_every_read_of_a_copy_sees_the_rows_of_its_epoch(program, world_size, options):
    assert states_of(program, world_size, **options) > 100


ONE_BY_ONE = ((0,), (1,), (2,))


@pytest.mark.thin
@pytest.mark.parametrize(
    ("buckets", "ahead"),
    [(ONE_BY_ONE, 1), (ONE_BY_ONE, 2), (((0,), (1, 2)), 1), (((0, 1, 2),), 1)],
)
@pytest.mark.parametrize(("world_size", "steps"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("ring", [1, 2])
def test_copies_that_take_turns_are_right(buckets, ahead, world_size, steps, ring):
    program = partial(in_turns, buckets=buckets, ahead=ahead, steps=steps)
    assert states_of(program, world_size, parameters=3, ring=ring) > 100


@pytest.mark.parametrize("backward_between", [False, True])
@pytest.mark.parametrize(("world_size", "ring"), [(2, 1), (2, 2), (2, 3), (3, 2)])
def test_steps_after_a_forward_that_raised_are_right(world_size, ring, backward_between):
    program = partial(abandoning, backward_between=backward_between)
    assert states_of(program, world_size, parameters=3, ring=ring) > 100


# With 0, all ranks come to the same places again.
@pytest.mark.parametrize("started", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_nobody_reads_what_is_wrong_before_ranks_that_have_gathered_different_things_raise(
    world_size, started
):
    program = partial(diverging, started=started)
    assert states_of(program, world_size, parameters=3, ring=2, may_raise=True) > 50


@pytest.mark.parametrize(("world_size", "cells"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize(
    "program", [partial(training, steps=2), partial(accumulation, backwards=2), nested]
)
def test_every_sum_is_of_the_gradients_of_its_step(program, world_size, cells):
    assert states_of(program, world_size, parameters=2, cells=cells) > 100


@pytest.mark.parametrize("forward_between", [False, True])
@pytest.mark.parametrize(
    ("counts", "cells"),
    [
        ((0, 1), 1),
        ((1, 2), 1),
        ((2, ALL), 1),
        ((0, 2), 2),
        ((1, 2), 2),
        ((2, ALL), 2),
        ((0, 1, 1), 1),
        ((1, 2, 1), 1),
        ((2, 2, ALL), 1),
    ],
)
def test_the_backward_after_one_that_raised_is_right(counts, cells, forward_between):
    program = partial(raising, counts=counts, forward_between=forward_between)
    assert states_of(program, len(counts), parameters=2, cells=cells) > 100


@pytest.mark.parametrize("raises", [None, "after it announces"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_reads_what_the_others_announce(world_size, raises):
    assert states_of(partial(telling, raises=raises), world_size) > 100


@pytest.mark.parametrize(("world_size", "rounds"), [(2, 3), (3, 1)])
def test_nobody_sleeps_through_a_notification(world_size, rounds):
    assert states_of_sleepers(world_size, rounds) > 100


MISTAKES = {
    "writes before the others have arrived": (
        partial(evaluation, forwards=2),
        {"without": "arrived"},
        "reads rows of",
    ),
    "reads before the others have published": (
        partial(evaluation, forwards=1),
        {"without": "published"},
        "reads rows of",
    ),
    "starts where something is that it has not read": (
        partial(in_turns, buckets=((0,), (1, 2))),
        {"without": "pins", "ring": 2},
        "reads rows of",
    ),
    "starts where something is that it still reads": (
        partial(in_turns, buckets=ONE_BY_ONE),
        {"without": "leave", "ring": 2},
        "reads rows of",
    ),
    "starts ahead of what waits for room": (
        partial(in_turns, buckets=ONE_BY_ONE),
        {"without": "line", "ring": 1},
        "is waited for after others",
    ),
    "raises where others have gone on after a forward that raised": (
        abandoning,
        {"without": "patience", "ring": 3},
        "where others have it not",
    ),
    "has gathered what others have not": (
        diverging,
        {"ring": 2},
        "where others have it not",
    ),
    "writes where others have something else": (
        diverging,
        {"without": "history", "ring": 2},
        "reads rows of",
    ),
    "waits for parameters in an order of its own": (waiting_in_another_order, {}, "deadlock"),
    "reads before the others have posted": (
        partial(training, steps=1),
        {"without": "posted"},
        "reads gradient of",
    ),
    "writes to memory of the mailbox that others read": (
        partial(training, steps=1),
        {"without": "consumed"},
        "reads gradient of",
    ),
    "describes a gradient while others read what the one before is": (
        partial(accumulation, backwards=1),
        {"without": "latest", "cells": 2},
        "reads (gradient|description) of",
    ),
    "does not tell which backwards are over": (
        partial(raising, counts=(1, 2)),
        {"without": "oldest_backward", "cells": 2},
        "deadlock",
    ),
    "counts gradients and not backwards": (
        partial(raising, counts=(1, 2)),
        {"without": "backward"},
        "reads gradient of",
    ),
    "counts backwards, and not what they belong to": (
        partial(raising, counts=(0, 1)),
        {"without": "gathers"},
        "reads gradient of",
    ),
    "reads before the others have announced": (telling, {"without": "announced"}, "reads topic"),
    "announces while others read what it announced before": (
        telling,
        {"without": "acknowledged"},
        "reads topic",
    ),
    "waits for the announcement of a rank that has raised before it": (
        partial(telling, raises="before it announces"),
        {},
        "deadlock",
    ),
    "finds no room where others raised before they posted": (
        partial(raising, counts=(0, 2)),
        {},
        "deadlock",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
    program, options, found = MISTAKES[mistake]
    with pytest.raises(ProtocolError, match=found):
        states_of(program, 2, parameters=3, **options)


@pytest.mark.parametrize("order", ["wakes before it notifies", "looks before it listens"])
def test_a_notification_that_wakes_nobody_is_found(order):
    with pytest.raises(ProtocolError, match="wake up"):
        states_of_sleepers(2, 1, order)
