"""A pass of the user's that breaks a graph makes compilation fail, and the error says how."""

import copy
import operator
import re
from types import SimpleNamespace

import pytest
import torch
from support import models
from support.job import needs_a_job
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed

from deepcompile_zero3 import Zero3Error, capture_graphs, fully_shard, graph_pass
from deepcompile_zero3.graph.calls import graph_modules
from deepcompile_zero3.graph.metadata import KEEP, KEPT_OF
from deepcompile_zero3.passes.graph_pass import MAY_CHANGE
from deepcompile_zero3.passes.invariants import INVARIANTS
from deepcompile_zero3.runtime import ops

pytestmark = needs_a_job
aten = torch.ops.aten

# Name of each broken pass: the pass, the invariant that it breaks, and a pattern of what is wrong.
BROKEN = {}


def broken(invariant, text, graph="forward", **settings):
    """Adds a pass to the table: a function of the nodes of a graph, which are attributes."""

    def decorate(function):
        def rewrite(gm, facts):
            function(SimpleNamespace(**{node.name: node for node in gm.graph.nodes}))

        rewrite.__name__ = name = function.__name__
        BROKEN[name] = graph_pass(graphs=(graph,), **settings)(rewrite), invariant, text
        return function

    return decorate


def add(after, target, *args, **kwargs):
    with after.graph.inserting_after(after):
        node = after.graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*fx.map_arg(args, lambda each: each.meta["val"]), **kwargs)
    return node


def cast(node):
    return add(node, aten._to_copy.default, node, dtype=torch.bfloat16)


@broken("well_formed", "'t' is used before it is computed, at the node 'mm: .*'")
def moves_a_node_behind_its_use(n):
    n.mm.append(n.t)


@broken("well_formed", r"a new node has no meta\['val'\], .*, at the node 'neg.*'")
def adds_a_node_without_a_fake_tensor(n):
    add(n.t, aten.neg.default, n.t).meta.clear()


@broken("signature", "inputs were removed: mm_1", "backward")
def removes_an_input(n):
    n.mm_1.replace_all_uses_with(n.mm)
    n.mm_1.graph.erase_node(n.mm_1)


@broken("signature", "inputs were added or moved")
def adds_an_input(n):
    with n.t.graph.inserting_after(n._2_weight):
        n.t.graph.placeholder("more").meta["val"] = n.t.meta["val"]


@broken("signature", "it returns 8 results, and returned 7")
def adds_a_result(n):
    n.output.update_arg(0, [*n.output.args[0], n.mm])


@broken("signature", "it returns 3 results, and returned 4", "backward")
def drops_a_result(n):
    n.output.update_arg(0, n.output.args[0][:-1])


@broken("signature", r"result 0 was .*float32.* and is .*bfloat16.*, at the node 'return \[_to.*")
def casts_a_result(n):
    n.output.replace_input_with(n.mm_2, cast(n.mm_2))


@broken("signature", r"result 0 was .* \[2, 4\] on cpu and is .* \[4, 2\] on cpu, .*")
def transposes_a_result(n):
    n.output.replace_input_with(n.mm_2, add(n.mm_2, aten.t.default, n.mm_2))


@broken("signature", "it returns one node, and returned a list, at the node 'return mm_2'")
def returns_a_node(n):
    n.output.args = (n.mm_2,)


@broken("kept", "it is marked .*, and may not be, at the node '_0_weight: .*'", after="choose_kept")
def keeps_what_is_to_be_resharded(n):
    n._0_weight.meta[KEEP] = True


@broken("gathers_before_reads", "'0.weight' is read by its placeholder, .*, at the node 't: .*'")
def reads_a_placeholder(n):
    n.t.update_arg(0, n._0_weight)


@broken("gathers_are_paired", "0 nodes wait for a gather, .*, at the node 'all_gather_2: .*'")
def never_waits(n):
    n._2_weight_full.replace_all_uses_with(add(n._2_weight_full, aten.full.default, [4, 4], 1.0))
    n.t.graph.erase_node(n._2_weight_full)
    n.t.graph.erase_node(n.gathered_2)


@broken("gathers_are_paired", "2 nodes wait for a gather, .*, at the node 'all_gather_2: .*'")
def waits_twice(n):
    add(n.gathered_2, n.gathered_2.target, *n.gathered_2.args)


@broken("gathers_are_paired", "it waits for other parameters .*, at the node 'gathered_2 = .*'")
def waits_for_another(n):
    n.gathered_2.update_arg(1, [n._0_weight])


@broken("gathers_are_paired", "'primals_2' is gathered, and is no parameter, .*'all_gather_2: .*")
def gathers_an_activation(n):
    n.all_gather_2.update_arg(0, [n.primals_2])
    n.gathered_2.update_arg(1, [n.primals_2])


@broken("gathers_are_paired", "the gather has 1 parameters and a token, at the node 'getitem.*")
def reads_an_item_that_is_not_there(n):
    add(n._2_weight_full, aten.neg.default, n._2_weight_full).replace_input_with(
        n._2_weight_full, add(n.gathered_2, operator.getitem, n.gathered_2, -2)
    )


@broken(
    "gathers_are_paired", "gathers come with the pass 'insert_gathers', .*", after="choose_kept"
)
def gathers_too_early(n):
    start = add(n._2_weight, ops.all_gather_start.default, [n._0_weight])
    add(start, ops.all_gather_wait.default, start, [n._0_weight])


@broken("well_formed", "its arguments are given by position, .*'all_gather_again.*")
def gives_a_token_by_keyword(n):
    target, place = ops.all_gather_start.default, n.gathered_2
    with place.graph.inserting_after(place):
        again = place.graph.create_node(
            "call_function", target, ([n._0_weight],), {"after": n.token}, name="all_gather_again"
        )
    again.meta["val"] = n.all_gather.meta["val"]


@broken("gathers_are_paired", "it has another number of formats .*, at the node 'all_gather: .*'")
def has_two_formats_for_one(n):
    n.all_gather.args = ([n._0_weight], None, "int8/4,int8/4")


@broken("same_gathers", "missing: 2.weight; new: none")
def leaves_out_a_gather(n):
    never_waits(n)
    n.gathered_1.update_arg(2, None)
    n.t.graph.erase_node(n.all_gather_2)


@broken("same_gathers", "missing: none; new: 2.weight, 2.weight")
def gathers_twice(n):
    again = add(n.gathered_2, ops.all_gather_start.default, [n._2_weight], n.all_gather_2)
    add(again, n.gathered_2.target, again, [n._2_weight])


@broken("gather_order", r"gathers were .*, and are \[0.weight\], \[2.weight\], \[1.weight\]")
def swaps_gathers(n):
    n.all_gather_1.update_arg(0, [n._2_weight])
    n.all_gather_2.update_arg(0, [n._1_weight])
    n.gathered_1.args = (n.all_gather_2, [n._1_weight])
    n.gathered_2.args = (n.all_gather_1, [n._2_weight], *n.gathered_2.args[2:])


@broken("gathers_are_chained", ".* before it, 'gathered_1', .* 'gathered_2 = zero3.all_gather_.*")
def waits_without_the_token(n):
    n.gathered_2.args = n.gathered_2.args[:2]


@broken("gathers_are_chained", ".* the gather before it, 'all_gather', .* 'all_gather_1: .*")
def starts_without_the_handle(n):
    n.all_gather_1.update_arg(1, None)


@broken("gathers_are_chained", ".* before it, 'all_gather_1', .* 'all_gather_2: .*", "backward")
def waits_without_the_handle(n):
    n.gathered.update_arg(2, None)


@broken("reductions_once", "the gradient of '1.weight' is not reduced", "backward")
def leaves_out_a_reduction(n):
    n.reduce_grad_2.update_arg(2, n.reduce_grad)
    n.reduce_grad_1.graph.erase_node(n.reduce_grad_1)


@broken("reductions_once", "the gradient of '0.weight' is reduced twice, at the .*", "backward")
def reduces_twice(n):
    last = n.reduce_grad_2
    add(last, last.target, *last.args[:2], last, **last.kwargs)


@broken("reductions_once", "the contract .* is 'float32', and here 'bfloat16', .*", "backward")
def changes_a_contract(n):
    n.reduce_grad_2.update_kwarg("contract", "bfloat16")


@broken("gradients", "the gradient of '1.weight' was t_10 of torch.float32, at the .*", "backward")
def casts_a_gradient(n):
    n.reduce_grad_1.update_arg(0, cast(n.reduce_grad_1.args[0]))


@broken("reduction_order", "reductions were .*, and are 1.weight, 2.weight, 0.weight", "backward")
def swaps_reductions(n):
    n.reduce_grad_1.append(n.reduce_grad)
    n.reduce_grad_1.update_arg(2, None)
    n.reduce_grad.args = (*n.reduce_grad.args, n.reduce_grad_1)
    n.reduce_grad_2.update_arg(2, n.reduce_grad)


@broken("gradients", "the gradient of '0.weight' was t_14 of torch.float32, .*", "backward")
def swaps_parameters_of_reductions(n):
    n.reduce_grad_1.update_arg(1, n._0_weight)
    n.reduce_grad_2.update_arg(1, n._1_weight)


@broken("gradients", "result 2, a gradient, was .*", "backward", after="drop_needed_in_backward")
def halves_a_gradient(n):
    gradient = n.output.args[0][2]
    n.output.replace_input_with(gradient, add(gradient, aten.mul.Tensor, gradient, 0.5))


@broken("reductions_are_chained", ".* before it, 'reduce_grad_1', at the .*", "backward")
def reduces_with_an_earlier_token(n):
    n.reduce_grad_2.update_arg(2, n.reduce_grad)


@broken("frees_gathered", "the full '1.weight' is saved .*, at the node 'return .*")
def saves_a_full_tensor(n):
    n.output.replace_input_with(n._1_weight, n._1_weight_full)


@broken("frees_gathered", "result 3 was the placeholder of '1.weight', at the node 'return .*")
def saves_a_copy_of_a_full_tensor(n):
    clone = add(n._1_weight_full, aten.clone.default, n._1_weight_full)
    n.output.replace_input_with(n._1_weight, clone)


@broken("frees_gathered", "result 1 was the placeholder of '0.weight', at the node 'return .*")
def swaps_saved_placeholders(n):
    swapped = {n._0_weight: n._1_weight, n._1_weight: n._0_weight}
    n.output.args = ([swapped.get(each, each) for each in n.output.args[0]],)


@broken("no_writes", "'0.weight' is written to, .*")
def writes_by_a_keyword(n):
    full = n._0_weight_full
    with full.graph.inserting_after(full):
        node = full.graph.call_function(aten.add.out, (full, full), {"out": full})
    node.meta["val"] = full.meta["val"]


@broken("no_writes", "'0.weight' is written to, .*")
def writes_to_a_list(n):
    add(n._0_weight_full, aten._foreach_add_.Scalar, [n._0_weight_full], 1.0)


@broken("well_formed", "it does not call an operator, .*, at the node 'iadd.*")
def writes_by_an_operator_of_python(n):
    add(n._0_weight_full, operator.iadd, n._0_weight_full, 1)


@broken("no_writes", "'0.weight' is written to, .*")
def writes_to_an_unsafe_view(n):
    view = add(n._0_weight_full, aten._unsafe_view.default, n._0_weight_full, [16])
    add(view, aten.add_.Tensor, view, 1)


@broken("no_writes", "'mm' is written to, .*")
def writes_to_an_activation(n):
    add(n.mm, aten.add_.Tensor, n.mm, 1)


@broken("no_writes", "'0.weight' is written to, at the node 'add__tensor: .*'")
def writes_to_a_full_tensor(n):
    add(n._0_weight_full, aten.add_.Tensor, n._0_weight_full, 1)


@broken("no_writes", "'0.weight' is written to, at the node 'add__tensor: .*'", "backward")
def writes_to_a_view_of_a_full_tensor(n):
    add(n.t, aten.add_.Tensor, n.t, 1)


@broken("no_writes", "'0.weight' is written to, at the .*", after="choose_kept")
def writes_to_a_placeholder(n):
    add(n._2_weight, aten.add_.Tensor, n._0_weight, 1)


@broken("gathered_peak", "the predicted peak was 128 bytes, and is 192")
def starts_all_gathers_at_once(n):
    n.token.append(n.all_gather_2)


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


def test_memory_that_ranks_share_is_not_returned(run_ranks):
    run_ranks(2, _removes_clones)
