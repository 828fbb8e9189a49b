"""A training loop in torchtitan's style: torchrun --nproc-per-node 2 examples/pretrain.py

Blocks are checkpointed, compiled and sharded while the model is on the meta device; weights are
initialized in shards. Called again with the same --folder, the loop goes on from the checkpoint
that it saved last. The lines that differ from a script for FSDP2 are marked.
"""

import argparse
import glob
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

from deepcompile_zero3 import fully_shard  # marked

VOCABULARY = 64
SEQUENCE = 16
ROWS = 4  # sequences of a rank in a micro-batch


class Block(nn.Module):
    """Attention with rotary embeddings, and a feedforward: [batch, sequence, width] -> same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feedforward_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Returns the block's output."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)  # [batch, heads, sequence, size of a head]
        q, k = rotate(q, rotary), rotate(k, rotary)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(self.feedforward_norm(x))))

    def init_weights(self, std: float) -> None:
        """Sets all parameters."""
        for norm in (self.attention_norm, self.feedforward_norm):
            norm.reset_parameters()
        for linear in (self.qkv, self.out, self.up, self.down):
            nn.init.trunc_normal_(linear.weight, std=std)


def rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of features by angles that grow with the position."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = rotary.to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Transformer(nn.Module):
    """A small decoder: tokens [batch, sequence] -> logits [batch, sequence, vocabulary]."""

    rotary: torch.Tensor

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 3):
        super().__init__()
        self.head_size = width // heads
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleDict({str(i): Block(width, heads) for i in range(depth)})
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("rotary", self.angles(), persistent=False)

    def angles(self) -> torch.Tensor:
        """Returns cosines and sines: [2, sequence, half a head]."""
        half = self.head_size // 2
        angles = torch.outer(torch.arange(SEQUENCE), 100.0 ** (-torch.arange(half) / half))
        return torch.stack([angles.cos(), angles.sin()])

    def init_weights(self) -> None:
        """Sets all parameters and buffers, as they are after ``to_empty``."""
        with self.rotary.device:
            self.rotary = self.angles()
        nn.init.normal_(self.tok_embeddings.weight)
        for block in self.layers.values():
            block.init_weights(std=0.02)
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, std=0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits."""
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.rotary)
        return self.output(self.norm(x))


def parallelize(
    model: Transformer, mesh: DeviceMesh, param_dtype: torch.dtype, compiled: dict[str, Any] | None
) -> None:
    """Checkpoints, compiles and shards each block, then the rest of the model."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    sharding: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    fully_shard(model.tok_embeddings, **sharding, reshard_after_forward=True)
    for name, block in model.layers.named_children():
        block = checkpoint_wrapper(block, preserve_rng_state=False)
        model.layers.register_module(name, block)
        if compiled is not None:
            block.compile(backend="zero3", fullgraph=True, **compiled)  # marked
        fully_shard(block, **sharding, reshard_after_forward=True)
    fully_shard([model.norm, model.output], **sharding, reshard_after_forward=False)
    fully_shard(model, **sharding)


class ModelState(Stateful):
    """The model in a checkpoint."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Returns the shards of this rank."""
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` returned, on any number of ranks."""
        set_model_state_dict(self.model, state_dict)


class OptimizerState(Stateful):
    """The optimizer in a checkpoint: its state goes by the names of parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank's shards."""
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` returned, on any number of ranks."""
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)


class Training(Stateful):
    """A model, its optimizer and schedule, and the number of steps done."""

    def __init__(
        self,
        param_dtype: torch.dtype = torch.bfloat16,
        compiled: dict[str, Any] | None = None,
        accumulate: int = 2,
    ):
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        with torch.device("meta"):
            self.model = Transformer()
        parallelize(self.model, self.mesh, param_dtype, compiled)
        self.model.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())  # on CPUs each rank draws the numbers of its shards
        with torch.no_grad():
            self.model.init_weights()
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)
        self.accumulate = accumulate
        self.done = 0

    def step(self) -> torch.Tensor:
        """Takes an optimizer step; returns the mean loss of all ranks and micro-batches."""
        losses = []
        for number in range(self.accumulate):
            self.model.set_requires_gradient_sync(number == self.accumulate - 1)
            tokens = batch(self.done * self.accumulate + number, dist.get_rank())
            loss = loss_of(self.model, tokens) / self.accumulate
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.done += 1
        mean = torch.stack(losses).sum() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    def parts(self) -> dict[str, Any]:
        """Returns what a checkpoint has."""
        return {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.model, self.optimizer),
            "schedule": self.schedule,
            "training": self,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps done."""
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the number of steps done."""
        self.done = state_dict["done"]


def warm_up(step: int) -> float:
    """Returns the factor of the learning rate."""
    return min(1.0, (step + 1) / 4)


def batch(number: int, rank: int) -> torch.Tensor:
    """Returns tokens of a micro-batch: sequences that count up, from anywhere."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    first = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
    return (first + torch.arange(SEQUENCE + 1)) % VOCABULARY


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the loss of the next tokens, in fp32."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def latest(folder: str) -> str | None:
    """Returns the path of the last complete checkpoint in ``folder``, or None."""
    complete = glob.glob(os.path.join(folder, "step-*", ".metadata"))  # torch writes this file last
    paths = map(os.path.dirname, complete)
    return max(paths, key=lambda path: int(path.rpartition("-")[2]), default=None)


def main() -> None:
    """Trains for some steps, and saves to a new folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="checkpoints", help="of the checkpoints")
    parser.add_argument("--no-inductor", action="store_true", help="run the graphs op by op")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    training = Training(compiled={"options": {"inductor": not arguments.no_inductor}})
    if (path := latest(arguments.folder)) is not None:
        dcp.load(training.parts(), checkpoint_id=path)
    for _ in range(arguments.steps):
        loss = training.step()
        if dist.get_rank() == 0:
            print(f"step {training.done}: loss {loss:.4f}")
    dcp.save(
        training.parts(), checkpoint_id=os.path.join(arguments.folder, f"step-{training.done}")
    )
    dist.barrier()  # so that gloo's threads hold nothing of Python's when it ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
