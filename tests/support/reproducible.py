"""Training runs that must give the same bits, and the ways in which they run."""

import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import transformer_models
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from deepcompile_zero3 import clip_grad_norm_, fully_shard, training_digest
from deepcompile_zero3.sharding.module_parameters import registered_in


@dataclass(frozen=True)
class Way:
    """A way to run. None of this may change a bit.

    Attributes:
        transport: how ranks exchange.
        how: "eager", "graph" for one graph, "blocks" for each block compiled by itself, or
            "breaks" for a graph that breaks after each block.
        options: options of the backend, beside ``inductor``.
        inductor: whether Inductor compiles.
        reshard: ``reshard_after_forward``.
        bucket_bytes: size of a bucket of gradients; None is the default.
        is_warm: whether another model has trained in this way before, in the same process.
        resumes: whether another model goes on from a checkpoint of the middle of the run.
    """

    transport: str = "shared_memory"
    how: str = "graph"
    options: dict = field(default_factory=dict)
    inductor: bool = False
    reshard: bool | None = None
    bucket_bytes: int | None = None
    is_warm: bool = False
    resumes: bool = False


def start(model_name, way, seed=0):
    """Returns the sharded model, what runs it, its optimizer and ``batch(size, seed)``."""
    torch.manual_seed(seed)
    task = getattr(transformer_models, model_name)()
    task.model.set_attn_implementation("eager")
    for module in (*task.blocks, task.model):
        fully_shard(module, transport=way.transport, reshard_after_forward=way.reshard)
    if way.bucket_bytes is not None:
        for parameter in registered_in(task.model):
            parameter.settings = parameter.settings.replace(bucket_bytes=way.bucket_bytes)
    options = {"inductor": way.inductor, **way.options}
    run = task.model
    if way.how == "graph":
        run = torch.compile(task.model, backend="zero3", options=options)
    elif way.how == "blocks":
        for block in task.blocks:
            block.compile(backend="zero3", options=options)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-2)
    return task.model, run, optimizer, task.batch


def train(model, run, optimizer, batch, steps, around=contextlib.nullcontext, every=1):
    """Yields the number and the digest of each of ``steps``, whose numbers begin at 0.

    If digests are rarer, they come after ``every`` steps.
    """
    ranks = dist.get_world_size()
    for step in steps:
        with around():
            mine = batch(4 * ranks, step)
            mine = {name: value.chunk(ranks)[dist.get_rank()] for name, value in mine.items()}
            run(**mine).loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if (step + 1) % every == 0:
            yield step, training_digest(model, optimizer)
        optimizer.zero_grad()


def resumed(model_name, first, way, folder):
    """Saves what ``start`` returned, and returns another such model that has loaded it."""
    model, _, optimizer, _ = first
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)

    again = start(model_name, way, seed=7)
    model, _, optimizer, _ = again
    states = get_state_dict(model, optimizer)
    dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    return again


def digests(model_name, way, steps, every=1, folder=None):
    """Returns the digests of a run, after ``every`` steps each.

    Args:
        model_name: a function of ``transformer_models``.
        way: how the run runs.
        steps: number of steps.
        every: number of steps between digests.
        folder: a folder for a checkpoint, for a run that resumes.
    """
    torch.compiler.reset()
    if way.is_warm:
        list(train(*start(model_name, way, seed=3), range(2)))
    running = start(model_name, way)
    if not way.resumes:
        return dict(train(*running, range(steps), every=every))
    found = dict(train(*running, range(steps // 2), every=every))
    running = resumed(model_name, running, way, folder)
    return found | dict(train(*running, range(steps // 2, steps), every=every))
