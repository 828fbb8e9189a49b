"""Training runs that must give the same bits, and the ways in which they run."""

import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from support import transformer_models

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
    """

    transport: str = "shared_memory"
    how: str = "graph"
    options: dict = field(default_factory=dict)
    inductor: bool = False
    reshard: bool | None = None
    bucket_bytes: int | None = None


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


def train(model, run, optimizer, batch, steps, around=contextlib.nullcontext):
    """Yields the number and the digest of each of ``steps``, whose numbers begin at 0."""
    ranks = dist.get_world_size()
    for step in steps:
        with around():
            mine = batch(4 * ranks, step)
            mine = {name: value.chunk(ranks)[dist.get_rank()] for name, value in mine.items()}
            run(**mine).loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        yield step, training_digest(model, optimizer)
        optimizer.zero_grad()


def digests(model_name, way, steps):
    """Returns the digest after each step of a run."""
    return dict(train(*start(model_name, way), range(steps)))
