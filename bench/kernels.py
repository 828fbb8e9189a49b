"""Compares the copy kernel, which casts, divides and lays out, with the device's memory.

A copy is bound by memory. Its bytes read and written per second are therefore compared with those
of a large plain copy on the same device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from bench import clock
from deepcompile_zero3.runtime import _C

SIZES = [4, 16, 64, 256]  # MiB read
REFERENCE = 1024
_LONGEST_HEAD_START = 1.0  # s


@dataclass(frozen=True)
class Copy:
    """One call of ``copy_all``.

    Attributes:
        divisor: copied values are divided by this number.
        piece: KiB of each copied tensor; None copies a single tensor.
    """

    name: str
    from_dtype: torch.dtype
    to_dtype: torch.dtype
    divisor: int = 1
    piece: int | None = None

    def moved(self, nbytes: int) -> int:
        """Returns the bytes read and written by a copy that reads ``nbytes``."""
        return nbytes + nbytes // self.from_dtype.itemsize * self.to_dtype.itemsize

    def tensors(self, nbytes: int, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the target tensors and the source tensors."""
        numel = nbytes // self.from_dtype.itemsize
        each = numel if self.piece is None else self.piece * 1024 // self.from_dtype.itemsize
        source = torch.randn(numel, device=device).to(self.from_dtype)
        target = torch.empty(numel, dtype=self.to_dtype, device=device)
        return list(target.split(each)), list(source.split(each))

    def ours(self, to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        through = min(self.from_dtype, self.to_dtype, key=lambda dtype: dtype.itemsize)
        _C.copy_all(to, source, through, self.divisor)

    def torchs(self, to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        """Copies with torch's own kernels."""
        if self.piece is not None:
            torch._foreach_copy_(to, source)
        elif self.divisor == 1:
            to[0].copy_(source[0])
        else:
            torch.div(source[0], self.divisor, out=to[0])


COPIES = [
    Copy("fp32 to bf16", torch.float32, torch.bfloat16),
    Copy("bf16 to fp32", torch.bfloat16, torch.float32),
    Copy("bf16 to bf16, pieces of 64 KiB", torch.bfloat16, torch.bfloat16, piece=64),
    Copy("fp32 to fp32, divided by 3", torch.float32, torch.float32, divisor=3),
]
HEAD = (
    "| kernel | MiB | best, µs | median, µs | GB/s | of a plain copy | torch's, µs |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def measure(
    device: str,
    sizes: list[int] = SIZES,
    reference: int = REFERENCE,
    repetitions: int = 20,
) -> Iterator[dict]:
    """Yields a row for torch's plain copy of ``reference`` MiB, then one for each copy and size."""
    plain = Copy("a plain copy (torch)", torch.float32, torch.float32)
    base = _row(plain, reference, _repeat(plain.torchs, plain, reference, device, repetitions))
    base["of_plain"] = 1.0
    yield base
    for copy in COPIES:
        for mebibytes in sizes:
            row = _row(copy, mebibytes, _repeat(copy.ours, copy, mebibytes, device, repetitions))
            row["of_plain"] = row["gbps"] / base["gbps"]
            row["torch"] = median(_repeat(copy.torchs, copy, mebibytes, device, repetitions))
            yield row


def line(row: dict) -> str:
    """Returns a line of the table."""
    torchs = f"{row['torch'] * 1e6:.1f}" if "torch" in row else ""
    return (
        f"| {row['kernel']} | {row['mib']} | {row['best'] * 1e6:.1f} | {row['median'] * 1e6:.1f} "
        f"| {row['gbps']:.0f} | {row['of_plain']:.0%} | {torchs} |"
    )


def _row(copy: Copy, mebibytes: int, seconds: list[float]) -> dict:
    return {
        "kernel": copy.name,
        "mib": mebibytes,
        "best": min(seconds),
        "median": median(seconds),
        "gbps": copy.moved(mebibytes << 20) / median(seconds) / 1e9,
    }


def _repeat(
    run: Callable, copy: Copy, mebibytes: int, device: str, repetitions: int
) -> list[float]:
    """Returns seconds of a call: a mean over consecutive calls for each repetition.

    Each call has tensors of its own, which together are four times as large as the L2 cache. No
    call thus finds its tensors in the cache.
    """
    nbytes = mebibytes << 20
    number = max(2, -(-4 * _cache_bytes(device) // copy.moved(nbytes)))
    tensors = [copy.tensors(nbytes, device) for _ in range(number)]
    for each in tensors:
        run(*each)
    measured = [_seconds(run, tensors, device) for _ in range(repetitions)]
    del tensors
    if device == "cuda":
        torch.cuda.empty_cache()
    return measured


def _seconds(run: Callable, tensors: list[tuple], device: str) -> float:
    """Times calls. The device is kept busy until the host has launched all, so that the host's time
    does not count.
    """
    head_start = 0.005
    while True:
        clock.wait(device)
        if device == "cuda":
            torch.cuda._sleep(int(head_start * 2e9))  # in cycles
        start = clock.mark(device)
        for each in tensors:
            run(*each)
        end = clock.mark(device)
        late = device == "cuda" and start.query()  # type: ignore[union-attr]
        clock.wait(device)
        if not late or head_start > _LONGEST_HEAD_START:
            return clock.seconds(start, end) / len(tensors)
        head_start *= 2


def _cache_bytes(device: str) -> int:
    return torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
