"""Memory that a step frees at the end of glibc's heap stays with the process, so that the next step
does not fault it in again.
"""

import resource

import pytest
import torch
from support.models import INDUCTOR_TOO, compiled
from support.ranks import RankPool
from torch import nn

from deepcompile_zero3 import fully_shard

WIDTH = 512
ROWS = 2048
DEPTH = 12
ACTIVATIONS = DEPTH * ROWS * WIDTH * 4  # bytes that only the products save for backward
PAGE = 4096


def _faults_of_steps(how, steps):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
    model = fully_shard(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    run = compiled(model, how, keep_mb=64)
    x = torch.randn(ROWS, WIDTH)
    faults = []
    for _ in range(steps):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return faults


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("eager", marks=pytest.mark.long),
        "interpreted",
        pytest.param("zero3", marks=INDUCTOR_TOO),
    ],
)
def test_a_steady_step_faults_no_activations_in(how):
    pool = RankPool(1, start_method="spawn")  # a new heap
    try:
        [faults] = pool.run(_faults_of_steps, how, 14, timeout=200)
    finally:
        pool.close()
    # 6 of 8 steps: a machine that is short of memory reclaims some in between.
    assert sum(sorted(faults[-8:])[:6]) < ACTIVATIONS / PAGE / 2, faults
