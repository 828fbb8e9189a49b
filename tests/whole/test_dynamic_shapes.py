"""Batches and lengths that change, and that differ from rank to rank.

A dimension is compiled for its first size and, once it has changed, for all sizes. A rank may
compile while the others do not: collectives and their order stay the same.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.models import (
    assert_same_gradients,
    assert_same_parameters,
    assert_same_step,
    batch_of,
    optimizers_of,
    shard,
)
from support.transformer_models import VOCABULARY, llama
from torch import nn

from deepcompile_zero3 import backend, capture_graphs, fully_shard, record_collectives
from deepcompile_zero3.backend import compile_with_inductor
from deepcompile_zero3.sharding.module_parameters import parameters_of

INTERPRETED = {"inductor": False}


def _layer_of_llama(transport):
    """Returns a sharded Llama of one layer, an unsharded copy, and their optimizers. Buckets are
    small, so that their order matters.
    """
    model = llama().model
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    model, reference = shard(model, model.model.layers, transport=transport)
    for module in model.modules():
        for parameter in parameters_of(module).values():
            parameter.settings = parameter.settings.replace(bucket_bytes=4096)
    return model, reference, optimizers_of(model, reference)


def _tokens(shape, seed):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def _train(shapes, compiling, transport, options, *, mark=(), dynamic=None):
    """Compares steps with one process; returns graphs compiled in each step, and collectives.

    Args:
        shapes: for each step, the [size, length] of each rank's batch.
        compiling: the number of steps that may compile.
        mark: the dimensions of a batch that are marked as dynamic.
    """
    model, reference, optimizers = _layer_of_llama(transport)
    options = {"gather_bucket_mb": 4096 / 2**20, **options}
    run = torch.compile(model, backend="zero3", options=options, dynamic=dynamic, fullgraph=True)
    compiled, traveled = [], []
    for step, of_ranks in enumerate(shapes):
        batches = [_tokens(shape, 10 * step + rank) for rank, shape in enumerate(of_ranks)]
        mine = batches[dist.get_rank()].clone()
        for dim in mark:
            torch._dynamo.mark_dynamic(mine, dim)
        stance = (
            torch.compiler.set_stance("fail_on_recompile")
            if step >= compiling
            else contextlib.nullcontext()
        )
        with stance, capture_graphs() as graphs, record_collectives() as log:
            loss = run(input_ids=mine, labels=mine).loss
            loss.backward()
        compiled.append(len(graphs.forward))
        assert len(graphs.backward) == compiled[-1]
        traveled.append([(c.op, c.nbytes, c.params) for c in log])
        expected = [reference(input_ids=batch, labels=batch).loss for batch in batches]
        torch.testing.assert_close(loss, expected[dist.get_rank()])
        torch.stack(expected).mean().backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)
    assert all(step == traveled[0] for step in traveled)
    return compiled, traveled[0]


def _alike(*shapes):
    return [[shape, shape] for shape in shapes]


# ---- the same on all ranks


def _train_as_said(shapes, said):
    return _train(shapes, 1, "shared_memory", INTERPRETED, **said)


@pytest.mark.long
def test_a_dimension_that_changes_is_compiled_once_more(run_ranks):
    shapes = _alike((2, 8), (2, 8), (2, 11), (2, 5), (4, 8), (3, 10), (6, 7))
    for compiled, _ in run_ranks(2, _train, shapes, 5, "shared_memory", INTERPRETED):
        assert compiled == [1, 0, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({"mark": (0, 1)}, id="mark_dynamic"),
        pytest.param({"dynamic": True}, id="dynamic=True"),
    ],
)
@pytest.mark.long
def test_dimensions_marked_as_dynamic_are_compiled_once(run_ranks, said):
    shapes = _alike((2, 8), (2, 11), (4, 8), (3, 10))
    for compiled, _ in run_ranks(2, _train_as_said, shapes, said):
        assert compiled == [1, 0, 0, 0]


# ---- different from rank to rank


@pytest.mark.long
def test_a_rank_may_compile_while_another_does_not(run_ranks):
    shapes = [
        [(2, 8), (2, 8)],
        [(2, 11), (2, 8)],  # the first rank compiles for every length
        [(2, 5), (3, 8)],  # the second rank compiles for every size
        [(4, 9), (3, 6)],  # both ranks compile for both
        [(5, 7), (2, 12)],
        [(3, 3), (6, 10)],
    ]
    options = INTERPRETED | {"keep_mb": 16 / 1024}  # some of the weights
    results = run_ranks(2, _train, shapes, 4, "c10d", options)
    assert [compiled for compiled, _ in results] == [[1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 0, 0]]
    assert results[0][1] == results[1][1]


def test_a_rank_may_have_one_row_where_another_has_many(run_ranks):
    shapes = [[(2, 8), (2, 8)], [(1, 8), (3, 8)], [(1, 8), (4, 8)], [(2, 8), (5, 8)]]
    results = run_ranks(2, _train, shapes, 2, "auto", INTERPRETED)
    assert [compiled for compiled, _ in results] == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert results[0][1] == results[1][1]


# ---- modes


def _step_in_mode(mode, transport):
    model, reference = shard(nn.Linear(8, 8), transport=transport)
    run = torch.compile(model, backend="zero3", mode=mode)
    assert_same_step(model, reference, batch_of(4, 8), run=run)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        ("default", "c10d"),
        ("max-autotune-no-cudagraphs", "shared_memory"),
        ("max-autotune-no-cudagraphs", "c10d"),
    ],
)
def test_modes_without_cuda_graphs_are_inductors_settings(run_ranks, mode, transport):
    run_ranks(2, _step_in_mode, mode, transport)


@pytest.mark.inductor
def test_a_mode_of_all_of_torch_hides_no_parameters(run_ranks):
    run_ranks(2, _step_with_lite_settings)


def _step_with_lite_settings():
    lite = torch._inductor.list_mode_options().get("lite", {})  # a release may not have it
    with torch._inductor.config.patch(lite):
        _step_in_mode("default", "shared_memory")


@pytest.mark.usefixtures("one_rank")
def test_settings_of_the_users_have_precedence_over_those_of_a_mode(monkeypatch):
    given = []
    monkeypatch.setattr(
        backend, "CompiledGraph", lambda gm, inputs, options, compile_graph: given.append(options)
    )
    mine = {"inductor_config": {"max_autotune": False}, "keep_mb": 1}
    backend.zero3(None, (), options=mine, mode="max-autotune-no-cudagraphs")
    expected = {"max_autotune": False, "coordinate_descent_tuning": True}
    assert given[0].inductor_config == expected
    assert given[0].keep_mb == 1


@pytest.mark.inductor
@pytest.mark.usefixtures("one_rank")
def test_nothing_is_captured_where_torch_captures_all_graphs(monkeypatch):
    captured = []

    def compile_graph(pipeline, graph, inputs, **settings):
        captured.append(bool(settings["cudagraphs"]))
        return compile_with_inductor(pipeline, graph, inputs, **settings)

    monkeypatch.setattr(backend, "compile_with_inductor", compile_graph)
    run = torch.compile(fully_shard(nn.Linear(2, 2)), backend="zero3")
    settings = {"triton.cudagraphs": True, "force_disable_caches": True}
    with torch._inductor.config.patch(settings):
        run(torch.ones(1, 2)).sum().backward()
    assert captured == [False, False]


class _Asking(nn.Linear):
    """Asks whether it has a bias, as Dynamo's guards then do."""

    def forward(self, x):
        return super().forward(x) if hasattr(self, "bias") else x


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_compiles_gathers_no_more_than_others():
    step = torch.compile(fully_shard(_Asking(4, 4)), backend="zero3", options=INTERPRETED)
    logs = []
    for _ in range(2):
        with record_collectives() as log:
            step(torch.ones(2, 4)).sum().backward()
        logs.append([(c.op, c.params) for c in log])
    assert logs[0] == logs[1]
