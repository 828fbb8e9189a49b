"""Marks moments in a device's stream, without waiting on the host."""

import time

import torch

Moment = float | torch.cuda.Event


def mark(device: str) -> Moment:
    """Returns the moment when all work launched so far is done."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(first: Moment, second: Moment) -> float:
    """Returns the seconds between two moments, both of which have passed."""
    if isinstance(first, float):
        return second - first  # type: ignore[operator]
    return first.elapsed_time(second) / 1e3  # type: ignore[arg-type]


def wait(device: str) -> None:
    """Waits until all launched work is done."""
    if device == "cuda":
        torch.cuda.synchronize()
