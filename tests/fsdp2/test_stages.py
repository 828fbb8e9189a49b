"""ZeRO's stages none, 1, 2 and 3, each by FSDP2's calls.

Losses equal those of one process in every stage; collectives and held memory differ.
"""

import copy
import ctypes
import itertools
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from support.models import INDUCTOR_TOO, Block, batch_of, compiled, mine, optimizers_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives, release_buffers

STAGES = ("none", 1, 2, 3)


def sharded(model, stage, **kwargs):
    """Returns ``model``, sharded so that each block and the rest are gathered separately."""
    if stage == "none":
        kwargs["mesh"] = init_device_mesh(
            "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
        )
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=stage == 3, **kwargs)
    return fully_shard(model, reshard_after_forward=stage == 3, **kwargs)


def say(model, stage, *, last):
    """Makes a script's calls before a micro-batch."""
    match stage:
        case "none":
            model.set_requires_all_reduce(last)
            model.set_reshard_after_backward(last)
        case 1:
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        case 2:
            model.set_reshard_after_backward(last)


# ---- losses


class Plain(nn.Module):
    """A model of blocks between two layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)

    def run(self, block, x):
        return block(x)


class Checkpointed(Plain):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.head.weight = self.stem.weight


def _on_meta(stage):
    """Returns a model that is sharded on the meta device, and a whole model of equal values."""
    reference = Plain()
    with torch.device("meta"):
        model = Plain()
    sharded(model, stage).to_empty(device="cpu")
    with torch.no_grad():
        for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    return model, reference


def _built(stage, kind):
    if kind == "meta":
        return _on_meta(stage)
    reference = {"plain": Plain, "checkpointed": Checkpointed, "tied": Tied}[kind]()
    return sharded(copy.deepcopy(reference), stage), reference


def _losses(run, optimizer, micro_batches, set_to_none, batches, before=lambda last: None):
    """Takes three steps and returns the losses of this rank's rows, or of all rows."""
    losses = []
    for step in range(3):
        loss = 0.0
        for micro in range(micro_batches):
            before(last=micro == micro_batches - 1)
            part = run(batches(seed=10 * step + micro)).square().mean() / micro_batches
            part.backward()
            loss += part.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss)
    return losses


def _trained(stage, kind, how):
    """Compares losses with one process; returns the number of compiled forwards."""
    with capture_graphs() as graphs:
        _train(stage, kind, how)
    return len(graphs.forward)


def _train(stage, kind, how):
    model, reference = _built(stage, kind)
    run = compiled(model, how)
    optimizer, whole_optimizer = optimizers_of(model, reference)
    for micro_batches in (1, 3):
        for set_to_none in (True, False):
            grid_point = micro_batches, set_to_none
            ours = _losses(
                run,
                optimizer,
                *grid_point,
                batches=lambda seed: mine(batch_of(4, 8, seed=seed)),
                before=lambda last: say(model, stage, last=last),
            )
            expected = _losses(
                reference,
                whole_optimizer,
                *grid_point,
                batches=lambda seed: batch_of(4, 8, seed=seed),
            )
            dist.all_reduce(total := torch.tensor(ours))
            assert (total / dist.get_world_size()).tolist() == pytest.approx(expected, rel=1e-5), (
                grid_point
            )


def _each_kind_and_way():
    kinds = "plain", "checkpointed", "meta", "tied"
    for (i, stage), (j, kind) in itertools.product(enumerate(STAGES), enumerate(kinds)):
        ways = ["eager", "interpreted"] if (i + j) // 2 % 2 else ["interpreted", "eager"]
        # covers each pair of a stage and a way, and of a kind and a way
        yield pytest.param(stage, kind, ways[0], marks=pytest.mark.long if (i + j) % 2 else ())
        yield pytest.param(stage, kind, ways[1], marks=pytest.mark.long)
        yield pytest.param(stage, kind, "zero3", marks=INDUCTOR_TOO)


@pytest.mark.parametrize(("stage", "kind", "how"), _each_kind_and_way())
def test_losses_are_those_of_one_process(run_ranks, stage, kind, how):
    compiled_once = 0 if how == "eager" else 1
    assert run_ranks(2, _trained, stage, kind, how) == 2 * [compiled_once]


# ---- collectives and memory

WIDTH = 512
WEIGHT = 4 * WIDTH * WIDTH  # bytes


class Products(nn.Module):
    """A model of layers of which backward needs the weights only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class _Mallinfo2(ctypes.Structure):
    """See https://man7.org/linux/man-pages/man3/mallinfo.3.html."""

    _fields_ = [("counts", ctypes.c_size_t * 10)]


def _map_weights():
    """Makes every tensor of a shard's size a mapping of its own, which is counted until freed."""
    m_mmap_threshold = -3
    assert ctypes.CDLL("libc.so.6").mallopt(m_mmap_threshold, WEIGHT // 4) == 1


def _allocated():
    """Returns the bytes of such mappings, without communication buffers."""
    release_buffers()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo2
    samples = []
    for _ in range(5):
        time.sleep(0.02)  # a thread frees another rank's message
        samples.append(libc.mallinfo2().counts[4])
    return min(samples)


def _micro_batches(stage, how):
    """Returns, for each micro-batch of a second step, how often a weight is sent and how many full
    models are held afterwards in addition to the shards.
    """
    _map_weights()
    model = sharded(Products(), stage, transport="c10d")
    run = compiled(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        start = _allocated()
        travels, held = [], []
        for micro in range(3):
            say(model, stage, last=micro == 2)
            with record_collectives() as log:
                run(batch_of(4, WIDTH, seed=micro).requires_grad_()).square().mean().backward()
            travels.append(Counter(c.op for c in log if "blocks.0.weight" in c.params))
            held.append((_allocated() - start) / (2 * WEIGHT))
        optimizer.step()
        optimizer.zero_grad()
    return travels, held


def _every_stage():
    return [
        (stage, *_micro_batches(stage, how)) for how in ("interpreted", "eager") for stage in STAGES
    ]


def test_each_stage_communicates_and_holds_what_it_does_not_shard(run_apart):
    gather, reduce, all_reduce = {"all_gather": 1}, {"reduce_scatter": 1}, {"all_reduce": 1}
    traveling = {
        "none": [gather | reduce, reduce, reduce | all_reduce],  # gathers over one rank
        1: [gather, {}, reduce],
        2: [gather | reduce, reduce, reduce],
        3: 3 * [{"all_gather": 2} | reduce],
    }
    # Parameters and gradients; after the last micro-batch, gradients only.
    holding = {"none": [2, 2, 1], 1: [2, 2, 0.5], 2: [1.5, 1.5, 0.5], 3: [0.5, 0.5, 0.5]}
    for stages in run_apart(_every_stage):
        for stage, travels, held in stages:
            assert travels == traveling[stage], stage
            assert held == pytest.approx(holding[stage], abs=0.1), stage
