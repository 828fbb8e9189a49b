"""Trains a small byte-level transformer, fully sharded, on the Python standard library's source.

    python examples/train.py                                  # two processes on this machine
    python examples/train.py --model gpt2 --ranks 4
    torchrun --nproc_per_node 2 examples/train.py --steps 500 # or with your own launcher

Two lines differ from an ordinary FSDP2 script: the import of `fully_shard`, and
`backend="zero3"`.
"""

import argparse
import math
import os
import socket
import sys
import time
from collections.abc import Callable

import report
import stdlib_text
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import logging as transformers_logging

from deepcompile_zero3 import fully_shard, quantize_gradients

VOCABULARY = 256  # one token a byte
HELD_OUT_WINDOWS = 32  # on each rank


def main() -> None:
    """Trains if a launcher started this process; otherwise launches the ranks."""
    args = parse_arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        try:
            train(args)
            dist.barrier()  # so that gloo's threads hold nothing of Python's when it ends
        finally:
            dist.destroy_process_group()
    else:
        launch(args.ranks)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line; a bad value ends the program with a message."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level transformer on the Python standard library's source.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=["llama", "gpt2"], default="llama", help="architecture")
    parser.add_argument("--steps", type=positive(int), default=100, help="optimizer steps")
    parser.add_argument("--ranks", type=positive(int), default=2, help="processes to launch")
    parser.add_argument("--batch", type=positive(int), default=4, help="windows a rank and step")
    parser.add_argument("--seq-len", type=positive(int), default=128, help="bytes a window")
    parser.add_argument("--lr", type=positive(float), default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument(
        "--backend",
        choices=["zero3", "eager"],
        default="zero3",
        help="compile the model with zero3, or run the same sharded model without a compiler",
    )
    codes = ["float8_e4m3fn", "float8_e5m2", "int8"]
    parser.add_argument(
        "--gather-dtype", choices=codes, help="all-gather matrices quantized to this dtype"
    )
    parser.add_argument(
        "--gradient-dtype", choices=codes, help="reduce gradients of matrices quantized to it"
    )
    args = parser.parse_args()
    if args.gather_dtype and args.backend == "eager":
        parser.error("argument --gather-dtype: needs --backend zero3")
    if not 2 <= args.seq_len <= 4096:
        parser.error(f"argument --seq-len: {args.seq_len} is not between 2 and 4096")
    return args


def positive(number: type[int] | type[float]) -> Callable[[str], int | float]:
    """Returns an argument type: an int or a float above zero."""

    def parse(text: str) -> int | float:
        value = number(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    parse.__name__ = f"positive {number.__name__}"  # the name in argparse's messages
    return parse


def launch(ranks: int) -> None:
    """Runs this command line in ``ranks`` processes, which communicate over loopback only."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    print(f"starting {ranks} ranks, which import torch and transformers", flush=True)
    arguments = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    torchrun([*arguments, *sys.argv])


def build(name: str, seq_len: int) -> tuple[nn.Module, nn.ModuleList]:
    """Returns a model of about 10 M parameters with random weights, and its blocks."""
    if name == "gpt2":
        gpt2 = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=seq_len,
                n_embd=512,
                n_layer=3,
                n_head=8,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        return gpt2, gpt2.transformer.h
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=seq_len,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    return llama, llama.model.layers


def train(args: argparse.Namespace) -> None:
    """Trains one rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0)
    train_text, held_out_text = stdlib_text.read()
    entropy = stdlib_text.unigram_entropy(held_out_text)
    console.print(
        f"{len(train_text) / 1e6:.1f} MB of Python to train on, {len(held_out_text) / 1e6:.1f} MB "
        "held out"
    )

    transformers_logging.set_verbosity_error()  # no warning about the default loss
    torch.manual_seed(args.seed)  # all ranks build the same weights
    model, blocks = build(args.model, args.seq_len)
    size = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh("cpu", (world_size,))
    transport = "c10d" if args.gradient_dtype else "auto"  # shared memory sends no gradients
    for block in blocks:
        fully_shard(block, mesh=mesh, transport=transport)
    fully_shard(model, mesh=mesh, transport=transport)
    if args.gradient_dtype:
        quantize_gradients(model, getattr(torch, args.gradient_dtype))
    console.print(f"{args.model}, {size / 1e6:.1f} M parameters; ranks: {world_size}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )
    options = {"gather_dtype": getattr(torch, args.gather_dtype)} if args.gather_dtype else None
    is_compiled = args.backend == "zero3"
    compiled = torch.compile(model, backend="zero3", options=options) if is_compiled else model

    def step(forward: nn.Module, tokens: torch.Tensor) -> float:
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if compiled is not model:
        console.print("the first step compiles: up to a minute; a few seconds once cached")
    batches = torch.Generator().manual_seed(args.seed * world_size + rank)  # each rank its own
    with progress_bar(console) as progress:
        task = progress.add_task("compiling", total=args.steps, loss=float("nan"), speed=0.0)
        for number in range(1, args.steps + 1):
            start = time.perf_counter()
            tokens = stdlib_text.random_windows(train_text, args.batch, args.seq_len, batches)
            loss = step(compiled, tokens)
            schedule.step()
            speed = world_size * tokens.numel() / (time.perf_counter() - start)
            progress.update(task, advance=1, description="training", loss=loss, speed=speed)
            if number % math.ceil(args.steps / 4) == 0 or number == args.steps:
                held_out = held_out_loss(model, held_out_text, args.seq_len, args.batch)
                progress.console.print(
                    f"step {number}: held-out loss {held_out:.3f} nats a byte "
                    f"(unigram entropy {entropy:.3f})"
                )

    console.print("measuring what a step costs")
    variants = {"eager": model} if compiled is model else {"compiled": compiled, "eager": model}
    report.show(console, variants, lambda forward: step(forward, tokens), optimizer)


def progress_bar(console: Console) -> Progress:
    """Returns a progress bar with step, loss, speed and remaining time; none on a quiet console."""
    return Progress(
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=console.quiet,
    )


@torch.no_grad()
def held_out_loss(model: nn.Module, text: torch.Tensor, seq_len: int, batch: int) -> float:
    """Returns the mean loss, in nats a byte, of windows that are divided among all ranks.

    The function calls the sharded model eagerly, so that no further graph is compiled. With
    --gather-dtype it evaluates the unrounded parameters.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    windows = stdlib_text.even_windows(text, HELD_OUT_WINDOWS * world_size, seq_len)
    losses = [
        model(input_ids=tokens, labels=tokens).loss * len(tokens)
        for tokens in windows[rank::world_size].split(batch)
    ]
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    return total.item() / len(windows)


if __name__ == "__main__":
    main()
