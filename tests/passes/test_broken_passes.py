"""A pass of the user's that breaks a graph makes compilation fail, and the error says how."""

import copy
import re

import pytest
import torch
from support import models
from support.broken_passes import BROKEN, add
from support.job import needs_a_job
from torch._dynamo.exc import BackendCompilerFailed

from deepcompile_zero3 import Zero3Error, capture_graphs, fully_shard, graph_pass
from deepcompile_zero3.graph.calls import graph_modules
from deepcompile_zero3.graph.metadata import KEEP, KEPT_OF
from deepcompile_zero3.passes.graph_pass import MAY_CHANGE
from deepcompile_zero3.passes.verify.invariants import INVARIANTS
from deepcompile_zero3.runtime import ops

pytestmark = needs_a_job
aten = torch.ops.aten


@pytest.fixture
def pair():
    """A model of three gathers and three reductions, and its reference."""
    model = models.layers_of(4, 4, 4, 4)
    return models.shard(model, model, reshard_after_forward=True)


def step(pair, *passes, tolerance=1e-5, rows=2, **options):
    options = {"gather_bucket_mb": 1e-6, "passes": passes} | options
    run = models.compiled(pair[0], "interpreted", **options)
    x = models.batch_of(rows, 4).requires_grad_()
    models.mean_square(run, x).backward()
    models.mean_square(pair[1], x).backward()
    models.assert_same_gradients(*pair, tolerance)


def error_of(pair, each):
    """Returns the error of a step, which torch wraps in a forward."""
    with pytest.raises((Zero3Error, BackendCompilerFailed)) as error:
        step(pair, each)
    return getattr(error.value, "inner_exception", error.value)


def test_each_invariant_is_broken_by_some_pass():
    tested = {invariant for _, invariant, _ in BROKEN.values()}
    assert tested | {"regions", "returns_no_views"} == set(INVARIANTS)  # which have tests below


@pytest.mark.parametrize("name", BROKEN)
def test_the_error_names_the_pass_and_what_it_broke_and_leaves_the_model_as_it_was(pair, name):
    each, invariant, text = BROKEN[name]

    error = error_of(pair, each)

    assert isinstance(error, Zero3Error)
    where = f"pass '{name}' broke '{invariant}' in the {each.graphs[0]} graph"
    promise = re.escape(INVARIANTS[invariant][0])
    hint = rf"\. If this is meant: changes=\('{invariant}',\)" if invariant in MAY_CHANGE else ""
    pattern = rf"{where}: {text}\. The promise is: {promise}{hint}"
    assert re.fullmatch(pattern, str(error)), str(error)
    step(pair)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("swaps_gathers", 1e-5),
        ("starts_all_gathers_at_once", 1e-5),
        ("swaps_reductions", 1e-5),
        ("casts_a_gradient", 1e-2),
    ],
)
def test_a_pass_that_says_what_it_gives_up_is_accepted(pair, name, tolerance):
    each = copy.copy(BROKEN[name][0])
    each.changes = (BROKEN[name][1],)

    with capture_graphs(passes=True) as graphs:
        step(pair, each, tolerance=tolerance)

    assert [bool(one.diff) for one in graphs.passes if one.name == name] == [True]


@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_an_error_of_a_pass_says_which_pass_raised_it(pair, graph):
    @graph_pass(graphs=(graph,))
    def divides(gm, facts):
        raise ZeroDivisionError("by nothing")

    error = error_of(pair, divides)

    text = (
        f"pass 'divides' over the {graph} graph raised ZeroDivisionError: by nothing (in divides, "
    )
    assert str(error).startswith(text)
    assert __file__ in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_pass_that_returns_another_graph_is_refused(pair):
    @graph_pass(graphs=("forward",))
    def copies(gm, facts):
        return copy.deepcopy(gm)

    message = "pass 'copies' over the forward graph returned a .*: it changes the graph and returns"
    assert re.match(message, str(error_of(pair, copies)))


def test_formats_stay_as_they_are(pair):
    @graph_pass(graphs=("forward",))
    def drops_a_format(gm, facts):
        start = gm.graph.find_nodes(op="call_function", target=ops.all_gather_start.default)[0]
        start.args = start.args[:2]

    with pytest.raises(Exception, match=r"missing: 0.weight \(int8/4\); new: 0.weight\."):
        step(pair, drops_a_format, gather_dtype=torch.int8)


def test_what_is_kept_is_not_changed_behind_the_gathers():
    model = models.layers_of(4, 4, 4)
    pair = models.shard(model, model)

    @graph_pass(graphs=("forward",), after="insert_gathers")
    def marks(gm, facts):
        gm.graph.find_nodes(op="placeholder")[0].meta[KEEP] = True

    assert "its mark has changed, which is too late" in str(error_of(pair, marks))


def test_no_placeholder_is_returned(pair):
    @graph_pass(graphs=("forward",))
    def returns(gm, facts):
        output, placeholder = gm.graph.output_node(), gm.graph.find_nodes(op="placeholder")[0]
        output.args = ([placeholder, *output.args[0][1:]],)

    with pytest.raises(Exception, match=r"the placeholder of '0.weight', .*, is result 0"):
        step(pair, returns, rows=4)


def test_a_tensor_that_a_forward_kept_is_not_written_to():
    model = models.layers_of(4, 4, 4)
    pair = models.shard(model, model, reshard_after_forward=False)

    @graph_pass(graphs=("backward",))
    def writes(gm, facts):
        (full,) = [node for node in gm.graph.nodes if node.meta.get(KEPT_OF) == "1.weight"]
        last = gm.graph.find_nodes(op="placeholder")[-1]
        add(last, aten.add_.Tensor, full, 1)

    assert "'1.weight' is written to" in str(error_of(pair, writes))


def test_regions_are_verified_too():
    model = models.layers_of(4, 4, 4, 4)
    pair = models.shard(model, model)

    @graph_pass(graphs=("forward",))
    def writes(gm, facts):
        (region,) = [each for each in graph_modules(gm) if each is not gm]
        full = region.graph.find_nodes(op="placeholder")[0]
        add(region.graph.find_nodes(op="placeholder")[-1], aten.add_.Tensor, full, 1)

    @graph_pass(graphs=("forward",))
    def returns_less(gm, facts):
        (region,) = [each for each in graph_modules(gm) if each is not gm]
        output = region.graph.output_node()
        output.args = (output.args[0][:-1],)

    @graph_pass(graphs=("forward",))
    def reduces(gm, facts):
        (region,) = [each for each in graph_modules(gm) if each is not gm]
        full = region.graph.find_nodes(op="placeholder")[0]
        last = region.graph.find_nodes(op="placeholder")[-1]
        add(last, ops.reduce_grad.default, full, full, contract="float32")

    for each, invariant in ((writes, "no_writes"), (returns_less, "regions"), (reduces, "regions")):
        with pytest.raises(Exception, match=f"pass '{each.name}' broke '{invariant}' in the"):
            step(pair, each, regions=True)


class _ReturnsAView(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight.t()


def _removes_clones():
    @graph_pass(graphs=("forward",))
    def removes(gm, facts):
        for clone in gm.graph.find_nodes(op="call_function", target=aten.clone.default):
            clone.replace_all_uses_with(clone.args[0])
            gm.graph.erase_node(clone)

    model = fully_shard(_ReturnsAView(4, 4), transport="shared_memory")
    run = models.compiled(model, "interpreted", passes=[removes])
    with pytest.raises(Exception, match="pass 'removes' broke 'returns_no_views' in the forward"):
        run(models.batch_of(2, 4))


@pytest.mark.gloo
def test_memory_that_ranks_share_is_not_returned(run_ranks):
    run_ranks(2, _removes_clones)
