"""The header that kernels include is precompiled beside the trace of the first graph."""

import os
import threading

import pytest
import torch
from support.models import batch_of, compiled, mean_square, shard
from torch import nn
from torch._inductor import codecache

from deepcompile_zero3 import backend


def _headers_of_two_starts(folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    cold = _headers()
    torch._dynamo.reset()
    return cold, _headers()


def _headers():
    """Returns what a first step precompiles: how often it starts to, what it makes in threads of
    its own, and what it waits for.
    """
    starts, made, waited_for = [], [], []

    def start(config):
        starts.append(config)
        real_start(config)

    def precompile(*command, **flags):
        is_main = threading.current_thread() is threading.main_thread()
        (waited_for if is_main else made).append(repr((command, sorted(flags.items()))))
        return real_precompile(*command, **flags)

    real_start, real_precompile = (
        backend.precompile_header,
        codecache._precompile_header.__wrapped__,
    )
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(backend, "precompile_header", start)
        patches.setattr(codecache, "_precompile_header", precompile)
        model, _ = shard(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
        run = compiled(model, "zero3")
        mean_square(run, batch_of(64, 64).requires_grad_()).backward()
    return len(starts), made, waited_for


@pytest.mark.more
@pytest.mark.inductor
@pytest.mark.smoke
def test_it_is_that_of_the_kernels(run_apart, tmp_path):
    cold, warm = run_apart(_headers_of_two_starts, tmp_path, world_size=1)[0]
    starts, made, waited_for = cold
    assert starts == len(made) == 1
    assert set(made) & set(waited_for)
    assert warm == (0, [], [])  # the kernels are there
