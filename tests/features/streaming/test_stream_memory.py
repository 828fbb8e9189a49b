"""A stream takes at most twice ``max_mb``, or twice its largest tensor."""

import os

import pytest
import torch.distributed as dist
from support.models import shard
from torch import nn

from deepcompile_zero3 import release_buffers, stream_full_parameters
from deepcompile_zero3.features.streaming.host_memory import KEPT_BYTES

MIB = 2**20
_PAGES = 8 * 4096  # that words, and ends of segments, take


def _shared_bytes():
    """Returns the memory of the anonymous files that this process has open, each once."""
    sizes = {}
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.exists(path) and "memfd:zero3" in os.readlink(path):
            found = os.stat(path)
            sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def _peak(widths, max_mb):
    release_buffers()  # which earlier streams of these processes have kept
    model = shard(nn.Sequential(*(nn.Linear(256, 4 * kib, bias=False) for kib in widths)))[0]
    rest, peak = _shared_bytes(), 0
    for name, tensor in stream_full_parameters(model, max_mb=max_mb, transport="shared_memory"):
        if dist.get_rank() == 0:
            peak = max(peak, _shared_bytes() - rest)
        assert tensor.shape == model.get_parameter(name).shape
        del tensor
    if dist.get_rank() == 0:
        kept = _shared_bytes() - rest
        assert 0 < kept <= min(peak, KEPT_BYTES)
        assert kept - release_buffers() in range(_PAGES)
    else:
        release_buffers()
    assert _shared_bytes() == rest
    return peak


@pytest.mark.parametrize(
    ("widths", "bound"),
    [
        ([64] * 40, 2 * MIB),
        ([64, 64, 600, 64, 64, 64, 64], 2 * 2400 * 1024),  # one is larger than max_mb
        ([1000, 1000, 1000, 64, 64], 2 * 4000 * 1024),  # each larger than max_mb
    ],
)
def test_a_stream_takes_at_most_two_buckets_above_rest(run_ranks, widths, bound):
    peak = run_ranks(2, _peak, widths, 1)[0]
    assert 0 < peak <= bound + _PAGES
