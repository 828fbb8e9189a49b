"""Runs of a ``MeasuredSchedule``, whose clocks and machine may be known ones."""

import collections
import contextlib
import random
from unittest import mock

import torch
import torch.distributed as dist
from support.models import Stack, batch_of, mean_square, mine, optimizers_of, shard

from deepcompile_zero3 import Link, Machine, MeasuredSchedule, record_collectives
from deepcompile_zero3.graph.recording import is_recording_graphs
from deepcompile_zero3.tools.scheduling import measured_schedule
from deepcompile_zero3.tools.scheduling.measured_step import MeasuredStep

OPTIONS = {"inductor": False, "gather_bucket_mb": 4, "keep_mb": 0}
STEPS = 40

# Gathers take most of a step, so that it is worth to keep what was gathered.
MACHINE = Machine(
    name="slow links",
    flops={torch.float32: 1e12},
    bandwidth=1e11,
    update_bandwidth=1e11,
    launch=1e-6,
    memory=float("inf"),
    ranks_per_host=4,
    local=Link(1e-5, 1e7),
    remote=Link(1e-5, 1e7),
    backend="gloo",
)


@contextlib.contextmanager
def known(quicker, free=1 << 40):
    """Gives this rank a clock and measurements of its own, with noise.

    A step takes a second, and ``quicker`` of it with another schedule.
    """
    noise = random.Random(dist.get_rank())
    now = collections.Counter()

    def clock(schedule):
        seconds = 1.0 if schedule._parameters[0].schedule is None else quicker
        now[schedule] += seconds * noise.uniform(0.95, 1.05)
        return now[schedule]

    def measured(steps, times):
        assert all(run.seconds > run.waited > 0 for step in steps for run in step.runs)
        numbers = (0.1 / times, 0.2 / times, 0.6 / times)
        return MeasuredStep(*(number * noise.uniform(0.9, 1.1) for number in numbers))

    with (
        mock.patch.object(MeasuredSchedule, "_clock", clock),
        mock.patch.object(MeasuredSchedule, "_machine", return_value=MACHINE),
        mock.patch.object(measured_schedule, "measured_step", measured),
        mock.patch.object(measured_schedule, "free_bytes", return_value=free),
        mock.patch.object(measured_schedule, "_MEASURING", 0),
    ):
        yield


def stack(transport="c10d", depth=4, width=32):
    """Returns a sharded model, by default one whose ranks exchange messages."""
    torch.manual_seed(0)
    model = Stack(width, depth)
    model, _ = shard(model, model.blocks, transport=transport)
    return model


def train(model, schedule=None, options=OPTIONS, micro_batches=1, steps=STEPS):
    """Returns the losses of steps of a model compiled now, and how often the last one gathered."""
    torch.compiler.reset()
    run = torch.compile(model, backend="zero3", options=options)
    [optimizer] = optimizers_of(model)
    losses = []
    for number in range(steps):
        with record_collectives() as log:
            for _ in range(micro_batches):
                loss = mean_square(run, mine(batch_of(4, model.head.in_features, seed=number)))
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return losses, sum(each.op == "all_gather" for each in log)


def chosen(quicker, micro_batches=1, file=None):
    """Returns the choice of steps, its reason, and how often a step gathers before and after it."""
    expected, gathers = train(stack(), micro_batches=micro_batches)
    model = stack()
    with known(quicker):
        schedule = MeasuredSchedule(model, file)
        losses, fewer = train(model, schedule, micro_batches=micro_batches)
    assert schedule.is_settled
    assert not is_recording_graphs()
    assert losses == expected
    return schedule.schedule, schedule.reason, gathers, fewer
