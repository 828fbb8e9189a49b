"""The header that kernels include is precompiled beside the trace of the first graph."""

import threading

import pytest
import torch
from support.models import batch_of, compiled, mean_square, shard
from torch import nn
from torch._inductor import codecache


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
def test_it_is_that_of_the_kernels(one_rank, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made, waited_for = _headers()
    assert len(made) == 1
    assert set(made) & set(waited_for)
    torch._dynamo.reset()
    assert _headers() == ([], [])  # loads what is compiled
