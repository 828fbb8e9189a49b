"""The header that kernels include is precompiled beside the trace of the first graph."""

import os
import threading

import pytest
import torch
from support.models import batch_of, compiled, mean_square, shard
from torch import nn
from torch._inductor import codecache


def _headers_of_two_starts(folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    cold = _headers()
    torch._dynamo.reset()
    return cold, _headers()


def _headers():
    """Returns what a first step precompiles: in threads of its own, and where it waits."""
    with pytest.MonkeyPatch.context() as patches:
        made, waited_for = [], []

        def precompile(*command, **flags):
            is_main = threading.current_thread() is threading.main_thread()
            (waited_for if is_main else made).append(repr((command, sorted(flags.items()))))
            return real(*command, **flags)

        real = codecache._precompile_header.__wrapped__
        patches.setattr(codecache, "_precompile_header", precompile)
        model, _ = shard(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
        run = compiled(model, "zero3")
        mean_square(run, batch_of(64, 64).requires_grad_()).backward()
    return made, waited_for


@pytest.mark.inductor
@pytest.mark.smoke
def test_it_is_that_of_the_kernels(run_apart, tmp_path):
    ((made, waited_for), warm) = run_apart(_headers_of_two_starts, tmp_path, world_size=1)[0]
    assert len(made) == 1
    assert set(made) & set(waited_for)
    assert warm == ([], [])  # loads what is compiled
