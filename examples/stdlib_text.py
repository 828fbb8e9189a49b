"""The text that the example learns: the source of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch

# Folders outside the library itself: installed packages, test suites and caches.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_HELD_OUT_EVERY = 20


def read() -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the standard library of this interpreter; every 20th file is held out.

    Returns:
        Two 1-D uint8 tensors: the training text and the held-out text, the same on every rank.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(files):
        text = held_out if number % _HELD_OUT_EVERY == 0 else train
        text += path.read_bytes()
    if min(len(train), len(held_out)) < 100_000:
        raise RuntimeError(
            f"the standard library in {root} has {len(files)} source files, {len(train)} bytes to "
            f"train on and {len(held_out)} held out: too little text. Does this Python come "
            "without its sources?"
        )
    return (
        torch.frombuffer(train, dtype=torch.uint8),
        torch.frombuffer(held_out, dtype=torch.uint8),
    )


def random_windows(
    text: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Returns ``count`` random windows: int64, (count, length)."""
    starts = torch.randint(len(text) - length + 1, (count,), generator=generator)
    return _windows(text, starts, length)


def even_windows(text: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Returns ``count`` evenly spaced windows, always the same: int64, (count, length)."""
    starts = torch.linspace(0, len(text) - length, count, dtype=torch.float64).long()
    return _windows(text, starts, length)


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


def unigram_entropy(text: torch.Tensor) -> float:
    """Returns the loss, in nats a byte, of the best model of byte frequencies without context."""
    frequencies = torch.bincount(text, minlength=256).double() / len(text)
    return torch.special.entr(frequencies).sum().item()
