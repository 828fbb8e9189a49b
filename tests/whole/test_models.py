"""Real models, sharded and compiled, train like one process of plain PyTorch."""

import copy

import pytest
import torch
from support import transformer_models
from support.models import assert_same_parameters, compiled, compiled_each_way, mine

from deepcompile_zero3 import capture_graphs, fully_shard

STEPS = 5


def _train(name, how, fullgraph=True, dtype=torch.float32):
    """Takes five steps; returns the numbers of forward and backward graphs of the first step."""
    task = getattr(transformer_models, name)()
    model = task.model.to(dtype)
    reference = copy.deepcopy(model)
    for block in task.blocks:
        fully_shard(block)
    fully_shard(model)
    run = compiled(model, how, fullgraph, keep_mb=64)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    graphs = []
    for step in range(STEPS):
        batch = task.batch(4, seed=step)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        once = torch._dynamo.config.patch(error_on_recompile=step > 0)
        with once, capture_graphs() as captured:
            run(**{name: mine(rows) for name, rows in batch.items()}).loss.backward()
        graphs.append((len(captured.forward), len(captured.backward)))
        reference(**batch).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)
    assert graphs[1:] == [(0, 0)] * (STEPS - 1), f"graphs compiled by step: {graphs}"
    return graphs[0]


@pytest.mark.smoke
@pytest.mark.inductor
def test_llama_trains_as_one_process_does(run_ranks):
    assert run_ranks(2, _train, "llama", "zero3", timeout=300) == [(1, 1)] * 2


@pytest.mark.more
@compiled_each_way
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("t5", marks=pytest.mark.long)])
def test_a_model_trains_as_one_process_does(run_ranks, name, how):
    assert run_ranks(2, _train, name, how, timeout=300) == [(1, 1)] * 2


# A key bias shifts all scores of a row alike. Its gradient is zero but for rounding errors, which
# AdamW amplifies to full steps. In float64, AdamW's epsilon exceeds them.


@pytest.mark.more
@compiled_each_way
def test_gpt2_trains_as_one_process_does_across_its_graph_break(run_ranks, how):
    results = run_ranks(2, _train, "gpt2", how, False, torch.float64, timeout=300)
    assert results == [(2, 2)] * 2


@pytest.mark.more
@compiled_each_way
def test_vit_trains_as_one_process_does(run_ranks, how):
    assert run_ranks(2, _train, "vit", how, True, torch.float64, timeout=300) == [(1, 1)] * 2
