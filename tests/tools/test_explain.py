"""``explain`` reports what a step does, and leaves no trace."""

import inspect
import json
import re
from collections import Counter

import pytest
import torch
from support.job import needs_a_job
from support.models import Stack, assert_same_step, batch_of, mean_square, mine, shard, shard_stack
from torch import nn

from deepcompile_zero3 import (
    Report,
    Zero3Error,
    capture_graphs,
    explain,
    fully_shard,
    record_collectives,
)
from deepcompile_zero3.tools.document import text_of
from deepcompile_zero3.tools.table import Table

OPTIONS = {"inductor": False, "gather_bucket_mb": 0.02, "keep_mb": 0.02}


def test_a_place_in_a_file_is_no_emoji():
    place = "models/gpt.py:100: call"
    assert text_of([place, Table("", ("at",), [(place,)])]).split("\n") == [place, "at", place]


class Tied(nn.Module):
    """A model that reads one parameter in two graphs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        torch._dynamo.graph_break()
        return self.head(x)


def _prediction_and_step(make, options, settings):
    model = make()
    model, reference = shard(model, getattr(model, "blocks", ()), **settings)
    batch = torch.arange(8).remainder(16) if make is Tied else batch_of(8, 16)
    report = explain(model, mine(batch), options=options)
    run = torch.compile(model, backend="zero3", options=options)
    with record_collectives() as log:
        assert_same_step(model, reference, batch, run=run)
    gathered = Counter(name for c in log if c.op == "all_gather" for name in c.params)
    predicted = Counter(
        name for graph in report.graphs for bucket in graph.gathers for name in bucket.parameters
    )
    return report, gathered == predicted, _nbytes(log, "all_gather"), _nbytes(log, "reduce_scatter")


def _nbytes(log, op):
    return sum(c.nbytes for c in log if c.op == op)


def _stack():
    return Stack(width=16, depth=3)


@pytest.mark.thin
@pytest.mark.parametrize("make", [_stack, Tied])
@pytest.mark.parametrize(
    ("transport", "again", "keep_mb", "is_kept"),
    [
        ("shared_memory", None, 64, False),  # shared memory costs nothing to gather again
        ("shared_memory", False, 0, True),
        ("c10d", None, 0, False),
        ("c10d", None, 64, True),
        ("c10d", False, 0, True),
    ],
)
def test_a_step_then_moves_what_was_predicted(run_ranks, make, transport, again, keep_mb, is_kept):
    options = {"inductor": False, "keep_mb": keep_mb}
    settings = {"transport": transport, "reshard_after_forward": again}
    results = run_ranks(2, _prediction_and_step, make, options, settings)
    for report, is_alike, gathered, reduced in results:
        assert is_alike
        assert report.is_shared == (transport == "shared_memory")
        assert report.is_shared == ("are read in the memory that ranks share" in str(report))
        assert (report.gathered, report.reduced) == (gathered, reduced)
        assert report.shards == report.nbytes // report.world_size
        assert any(graph.kept for graph in report.graphs) == is_kept
    one, other = (report.peak for report, *_ in results)
    assert one == other


class Random(nn.Module):
    """A model whose forward writes to a buffer, replaces another and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1).expand(4))
        self.fails = False

    def forward(self, x):
        self.calls = self.calls + 1
        x = self.drop(self.norm(self.first(x) * self.mask))
        self._check()
        return x

    @torch.compiler.disable
    def _check(self):
        if self.fails:
            raise ValueError("as asked for")


@needs_a_job
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_changes(fails):
    model = fully_shard(Random())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    batch = batch_of(8, 4).requires_grad_()
    state = torch.get_rng_state()
    model.fails = fails
    if fails:
        with pytest.raises(ValueError, match="as asked for"):
            explain(model, batch, options=OPTIONS)
    else:
        assert isinstance(explain(model, batch, options=OPTIONS), Report)
    assert torch.equal(torch.get_rng_state(), state)
    assert batch.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0], name
    assert model.mask._version == buffers["mask"][1]  # nobody wrote to it


@needs_a_job
def test_a_training_step_is_explained_in_inference_mode_too():
    model, _ = shard_stack()
    with torch.inference_mode():
        assert len(explain(model, batch_of(2, 8), options=OPTIONS).graphs) == 2


@needs_a_job
@pytest.mark.parametrize(
    "again",
    [*(pytest.param(again, marks=pytest.mark.long) for again in (True, False)), None],
)
@pytest.mark.more
def test_later_compilations_are_as_without_explain(again):
    model, reference = shard_stack(reshard_after_forward=again)
    for size in range(2, 12):  # more sizes than Dynamo's recompile limit
        report = explain(model, batch_of(size, 8), options=OPTIONS | {"keep_mb": size})
        assert len(report.graphs) == 2
    run = torch.compile(model, backend="zero3", options=OPTIONS)
    other, _ = shard_stack(reshard_after_forward=again)
    with capture_graphs() as graphs:
        assert_same_step(model, reference, batch_of(5, 8), run=run)
    torch._dynamo.reset()  # else `other` runs what was compiled for `model`
    with capture_graphs() as others:
        torch.compile(other, backend="zero3", options=OPTIONS)(batch_of(5, 8)).sum()
    texts = [re.sub(r"Stack[:_]\d+[._]", "", one.forward[0].text) for one in (graphs, others)]
    assert texts[0] == texts[1]
    assert "f32[5, 8]" in texts[0]  # no symbolic size


@needs_a_job
def test_where_nothing_is_compiled_that_is_said():
    model = fully_shard(nn.Linear(2, 2))
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(Zero3Error, match="no graph was compiled"),
    ):
        explain(model, torch.ones(1, 2), options=OPTIONS)


@needs_a_job
def test_an_unknown_option_is_a_value_error():
    with pytest.raises(ValueError, match="unknown option 'nope'"):
        explain(fully_shard(nn.Linear(2, 2)), torch.ones(1, 2), options={"nope": 1})


@needs_a_job
def test_a_model_that_is_compiled_already_is_explained():
    model = fully_shard(Stack())
    run = torch.compile(model, backend="zero3", options=OPTIONS)
    batch = batch_of(4, 8)
    mean_square(run, batch).backward()
    assert explain(run, batch, options=OPTIONS).gathered > 0
    with torch.no_grad():
        assert explain(run, batch, options=OPTIONS).reduced > 0


class Broken(Stack):
    def forward(self, x):
        x = torch.compiler.disable(self.blocks[0])(x)
        if x.sum() > 0:
            x = x + 1
        return self.head(self.blocks[1](x))


@needs_a_job
def test_parameters_read_in_eager_code_are_named():
    report = explain(fully_shard(Broken()), batch_of(4, 8), options=OPTIONS)
    assert any(name.startswith("blocks.0.") for name in report.in_eager)
    assert not any(name.startswith("blocks.1.") for name in report.in_eager)
    line = inspect.getsourcelines(Broken.forward)[1] + 1
    place = f"tools/test_explain.py:{line}: "
    assert any(reason.startswith(place) and "disable" in reason for reason in report.breaks)
    assert sum("Data-dependent branching" in reason for reason in report.breaks) == 1
    assert any(f"test_explain.py:{line + 1}: Data" in reason for reason in report.breaks)
    text = str(report)
    assert "gathered by eager code" in text
    assert "the graph breaks" in text


@needs_a_job
def test_it_fits_80_columns_and_json():
    report = explain(fully_shard(Stack()), batch_of(4, 8), options=OPTIONS)
    assert max(map(len, str(report).splitlines())) <= 80
    told = json.loads(json.dumps(report.to_dict()))
    assert told["gathered"] == report.gathered
    assert set(told) == {
        "model",
        "world_size",
        "is_shared",
        "parameters",
        "nbytes",
        "shards",
        "graphs",
        "breaks",
        "in_eager",
        "quantized",
        "gathered",
        "reduced",
        "peak",
    }
    assert told["peak"]["shards"] == report.shards
    assert told["peak"]["optimizer"] == 2 * report.shards


@needs_a_job
def test_unsharded_models_are_refused():
    with pytest.raises(Zero3Error, match="explain"):
        explain(nn.Linear(2, 2), torch.ones(1, 2))
    head = fully_shard(Stack()).head
    with pytest.raises(Zero3Error, match=r"'head\.weight' is gathered by a module around"):
        explain(head, torch.ones(1, 8))
    with pytest.raises(TypeError):
        explain(lambda x: x, torch.ones(1, 2))
