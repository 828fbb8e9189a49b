"""Moments of a device's work, in the order of its stream, which the host does not wait for."""

import time

import torch

Moment = float | torch.cuda.Event


def mark(device: str) -> Moment:
    """When what was launched until now is done."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(first: Moment, second: Moment) -> float:
    """Between two moments, of which both have come."""
    if isinstance(first, float):
        return second - first  # type: ignore[operator]
    return first.elapsed_time(second) / 1e3  # type: ignore[arg-type]


def wait(device: str) -> None:
    """Until all that was launched is done."""
    if device == "cuda":
        torch.cuda.synchronize()
