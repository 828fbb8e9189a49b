"""Each graph pass alone: a small graph goes in, and what comes out is shown as text.

No process group and no sharded parameter exists here: a pass sees a graph and frozen facts. After
a wanted change, ``EXPECTTEST_ACCEPT=1 pytest tests/test_passes.py`` writes the new texts.
"""

import inspect
import operator
import textwrap

import expecttest
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from deepcompile_zero3.graph.metadata import PARAMETER
from deepcompile_zero3.graph.text import graph_text, node_text
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.passes.facts import ParameterFacts, fqns_of
from deepcompile_zero3.passes.gather import insert_gathers
from deepcompile_zero3.passes.keep import choose_kept
from deepcompile_zero3.passes.lift import declare_grad_dtypes, lift_unshards, uses_of
from deepcompile_zero3.passes.partition import (
    drop_needs,
    needed_in_backward,
    settle_backward_gathers,
)
from deepcompile_zero3.passes.reduce import insert_reduces
from deepcompile_zero3.passes.widen import widen_weight_gradients
from deepcompile_zero3.runtime import REDUCTIONS, ops

NO_LIMIT = 2**30


def dynamo_graph(function, *args):
    """What ``torch.compile`` hands to a backend."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return lambda *_: tuple(torch.zeros(()) for _ in gm.graph.output_node().args[0])

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return graphs[0]


def partitioned_graph(function, *inputs):
    """A flat graph with the value of each node in ``meta["val"]``, as a partitioner leaves it."""
    gm = fx.symbolic_trace(function)
    with FakeTensorMode() as mode:
        FakeTensorProp(gm, mode).propagate(*inputs)
    return gm


def facts(fqn, **changes):
    return ParameterFacts(fqn=fqn, **{"group": 0, "nbytes": 64, **changes})


def of_layers(gm, **changes):
    """Facts of the graph's inputs w1, w2, ..., which are fc1.weight, fc2.weight, ..."""
    weights = [n for n in gm.graph.find_nodes(op="placeholder") if n.name.startswith("w")]
    known = {n: facts(f"fc{n.name[1:]}.weight", **changes.get(n.name, {})) for n in weights}
    for node, of_weight in known.items():
        node.meta[PARAMETER] = of_weight
    return known


def assert_text(gm, expected, lines=None):
    """The text of a graph, or some lines instead, is as expected: indented as in a test."""
    gm.graph.lint()
    text = textwrap.indent(lines or graph_text(gm), 8 * " ")
    expecttest.assert_expected_inline(f"{text}\n        ", expected, skip=1)


# ---- lift_unshards


def layer(x, w):
    weight = ops.unshard.default(w, "any")
    return torch.relu(torch.mm(x, weight))


@pytest.fixture
def x():
    return torch.ones(2, 4)


@pytest.fixture
def w():
    return torch.ones(4, 4, requires_grad=True)


@pytest.mark.smoke
def test_lifting_leaves_the_plain_model(x, w):
    gm = dynamo_graph(layer, x, w)
    assert_text(
        gm,
        """\
        l_w_
        l_x_
        weight = zero3.unshard(l_w_, 'any')
        mm = mm(l_x_, weight)
        relu = relu(mm)
        return [relu]
        """,
    )

    lift_unshards(gm)

    assert_text(
        gm,
        """\
        l_w_
        l_x_
        mm = mm(l_x_, l_w_)
        relu = relu(mm)
        return [relu]
        """,
    )


def test_uses_are_where_the_model_as_written_has_them(x, w):
    def model(ids, table, b):
        b = ops.unshard.default(b, "any")
        rows = torch.nn.functional.embedding(ids, ops.unshard.default(table, "any"))
        return torch.relu(rows @ b) @ b

    gm = dynamo_graph(model, torch.zeros(2, dtype=torch.int64), w, w.detach().clone())
    lift_unshards(gm)

    uses = {node.name: use for node, use in uses_of(gm.graph).items()}
    (table,) = (only for name, (_, only) in uses.items() if "table" in name)
    (b,) = ((at, only) for name, (at, only) in uses.items() if name.startswith("l_b"))
    assert table
    assert not b[1]
    assert [list(gm.graph.nodes)[at].target for at in b[0]] == [operator.matmul] * 2


@pytest.mark.smoke
def test_lifting_reaches_into_the_body_of_a_checkpoint(x, w):
    gm = dynamo_graph(lambda x, w: checkpoint(layer, x, w, use_reentrant=False), x, w)
    (body,) = gm.children()
    assert_text(
        body,
        """\
        l_w_
        l_x_
        weight = zero3.unshard(l_w_, 'any')
        mm = mm(l_x_, weight)
        relu = relu(mm)
        return [relu]
        """,
    )

    lift_unshards(gm)

    assert_text(
        body,
        """\
        l_w_
        l_x_
        mm = mm(l_x_, l_w_)
        relu = relu(mm)
        return [relu]
        """,
    )


@pytest.mark.smoke
def test_a_weight_that_leaves_the_graph_is_not_lifted(x, w):
    def tied(x, w):
        weight = ops.unshard.default(w, "any")
        return layer(x, w), torch.t(weight)

    gm = dynamo_graph(tied, x, w)

    lift_unshards(gm)

    assert_text(
        gm,
        """\
        l_w_
        l_x_
        weight = zero3.unshard(l_w_, 'any')
        mm = mm(l_x_, l_w_)
        relu = relu(mm)
        t = t(weight)
        return [relu, t]
        """,
    )


def test_a_weight_that_leaves_the_graph_through_a_checkpoint_is_not_lifted(x, w):
    def tied(x, w):
        weight = ops.unshard.default(w, "any")
        return torch.mm(x, weight), torch.t(weight)

    gm = dynamo_graph(lambda x, w: checkpoint(tied, x, w, use_reentrant=False), x, w)
    (body,) = gm.children()

    lift_unshards(gm)

    assert len(body.graph.find_nodes(op="call_function", target=ops.unshard.default)) == 1


def test_a_lifted_graph_computes_what_the_model_computes(x, w):
    gm = dynamo_graph(layer, x, w)
    lift_unshards(gm)

    values = {"l_x_": x, "l_w_": w}
    inputs = [values[node.name] for node in gm.graph.find_nodes(op="placeholder")]

    assert torch.equal(gm(*inputs)[0], torch.relu(x @ w))


# ---- declare_grad_dtypes


@pytest.mark.smoke
def test_a_contract_is_declared_before_its_input_is_used():
    gm = fx.symbolic_trace(lambda x, plain, kept, fp32: torch.mm(torch.mm(x, kept), fp32) + plain)

    declare_grad_dtypes(
        gm,
        {
            1: facts("plain"),
            2: facts("kept", grad_dtype=None, declares_grad_dtype=True),
            3: facts("fp32", grad_dtype=torch.float32, declares_grad_dtype=True),
        },
    )

    assert_text(
        gm,
        """\
        x
        plain
        kept
        fp32
        declare_1 = declare(fp32, float32)
        declare = declare(kept, None)
        mm = mm(x, kept)
        mm_1 = mm(mm, fp32)
        add = add(mm_1, plain)
        return add
        """,
    )


# ---- insert_gathers


def three_layers(x, w1, w2, w3):
    h = torch.mm(x, w1)
    h = torch.mm(h, w2)
    return torch.mm(h, w3)


def square(count=1):
    return [torch.empty(4, 4) for _ in range(count)]


@pytest.mark.smoke
def test_neighbours_of_one_group_share_a_gather_before_the_first_use():
    gm = partitioned_graph(three_layers, *square(4))

    insert_gathers(gm, of_layers(gm), NO_LIMIT)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        w3: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1, w2, w3])
        gathered = zero3.all_gather_wait(all_gather, [w1, w2, w3])
        w1_full: f32[4, 4] = getitem(gathered, 0)
        w2_full: f32[4, 4] = getitem(gathered, 1)
        w3_full: f32[4, 4] = getitem(gathered, 2)
        mm: f32[4, 4] = mm(x, w1_full)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        mm_2: f32[4, 4] = mm(mm_1, w3_full)
        return mm_2
        """,
    )


@pytest.mark.smoke
def test_a_gather_ends_where_the_group_does():
    gm = partitioned_graph(three_layers, *square(4))
    parameters = of_layers(gm, w2={"group": 1}, w3={"group": 1})

    insert_gathers(gm, parameters, NO_LIMIT)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        w3: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1])
        all_gather_1: i64[1] = zero3.all_gather_start([w2, w3], all_gather)
        gathered = zero3.all_gather_wait(all_gather, [w1], all_gather_1)
        w1_full: f32[4, 4] = getitem(gathered, 0)
        mm: f32[4, 4] = mm(x, w1_full)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w2, w3])
        w2_full: f32[4, 4] = getitem(gathered_1, 0)
        w3_full: f32[4, 4] = getitem(gathered_1, 1)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        mm_2: f32[4, 4] = mm(mm_1, w3_full)
        return mm_2
        """,
    )


@pytest.mark.smoke
def test_a_gather_is_no_larger_than_bucket_bytes():
    gm = partitioned_graph(three_layers, *square(4))
    parameters = of_layers(gm)

    insert_gathers(gm, parameters, bucket_bytes=2 * 64)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        w3: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1, w2])
        all_gather_1: i64[1] = zero3.all_gather_start([w3], all_gather)
        gathered = zero3.all_gather_wait(all_gather, [w1, w2], all_gather_1)
        w1_full: f32[4, 4] = getitem(gathered, 0)
        w2_full: f32[4, 4] = getitem(gathered, 1)
        mm: f32[4, 4] = mm(x, w1_full)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w3])
        w3_full: f32[4, 4] = getitem(gathered_1, 0)
        mm_2: f32[4, 4] = mm(mm_1, w3_full)
        return mm_2
        """,
    )


@pytest.mark.smoke
def test_a_parameter_larger_than_bucket_bytes_is_gathered_alone():
    gm = partitioned_graph(three_layers, *square(4))
    parameters = of_layers(gm, w2={"nbytes": 129})

    insert_gathers(gm, parameters, bucket_bytes=2 * 64)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        w3: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1])
        all_gather_1: i64[1] = zero3.all_gather_start([w2], all_gather)
        gathered = zero3.all_gather_wait(all_gather, [w1], all_gather_1)
        token: f32[0] = getitem(gathered, 1)
        w1_full: f32[4, 4] = getitem(gathered, 0)
        mm: f32[4, 4] = mm(x, w1_full)
        all_gather_2: i64[1] = zero3.all_gather_start([w3], token)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w2], all_gather_2)
        w2_full: f32[4, 4] = getitem(gathered_1, 0)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        gathered_2 = zero3.all_gather_wait(all_gather_2, [w3])
        w3_full: f32[4, 4] = getitem(gathered_2, 0)
        mm_2: f32[4, 4] = mm(mm_1, w3_full)
        return mm_2
        """,
    )


def forward_that_saves(x, w1, w2):
    h = torch.mm(x, w1)
    return torch.mm(h, w2), x, h, w1, w2


@pytest.mark.smoke
def test_what_forward_saves_of_a_parameter_stays_a_placeholder():
    gm = partitioned_graph(forward_that_saves, *square(3))

    insert_gathers(gm, of_layers(gm), NO_LIMIT)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1, w2])
        gathered = zero3.all_gather_wait(all_gather, [w1, w2])
        w1_full: f32[4, 4] = getitem(gathered, 0)
        w2_full: f32[4, 4] = getitem(gathered, 1)
        mm: f32[4, 4] = mm(x, w1_full)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        return [mm_1, x, mm, w1, w2]
        """,
    )


@pytest.mark.smoke
def test_without_reshard_after_forward_the_gathered_tensor_is_saved():
    gm = partitioned_graph(forward_that_saves, *square(3))
    parameters = of_layers(gm, w2={"reshard_after_forward": False})

    keep = choose_kept(parameters, NO_LIMIT)
    insert_gathers(gm, parameters, NO_LIMIT, keep)

    assert [parameters[node].fqn for node in keep] == ["fc2.weight"]
    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1, w2])
        gathered = zero3.all_gather_wait(all_gather, [w1, w2])
        w1_full: f32[4, 4] = getitem(gathered, 0)
        w2_full: f32[4, 4] = getitem(gathered, 1)
        mm: f32[4, 4] = mm(x, w1_full)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        return [mm_1, x, mm, w1, w2_full]
        """,
    )


@pytest.mark.smoke
def test_backward_gathers_in_its_own_order():
    def backward(x, h, w1, w2, tangent):
        grad_w2 = torch.mm(torch.t(h), tangent)
        grad_h = torch.mm(tangent, torch.t(w2))
        grad_w1 = torch.mm(torch.t(x), grad_h)
        grad_x = torch.mm(grad_h, torch.t(w1))
        return grad_x, grad_w1, grad_w2

    gm = partitioned_graph(backward, *square(5))

    insert_gathers(gm, dict(reversed(of_layers(gm, w2={"group": 1}).items())), NO_LIMIT)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        h: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        tangent: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w2])
        t: f32[4, 4] = t(h)
        mm: f32[4, 4] = mm(t, tangent)
        all_gather_1: i64[1] = zero3.all_gather_start([w1], all_gather)
        gathered = zero3.all_gather_wait(all_gather, [w2], all_gather_1)
        w2_full: f32[4, 4] = getitem(gathered, 0)
        t_1: f32[4, 4] = t(w2_full)
        mm_1: f32[4, 4] = mm(tangent, t_1)
        t_2: f32[4, 4] = t(x)
        mm_2: f32[4, 4] = mm(t_2, mm_1)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w1])
        w1_full: f32[4, 4] = getitem(gathered_1, 0)
        t_3: f32[4, 4] = t(w1_full)
        mm_3: f32[4, 4] = mm(mm_1, t_3)
        return [mm_3, mm_2, mm]
        """,
    )


@pytest.mark.smoke
def test_an_unshard_that_was_not_lifted_uses_the_gather_too():
    def forward(x, w1):
        weight = ops.unshard.default(w1, "any")
        return torch.mm(x, w1), torch.t(weight)

    gm = partitioned_graph(forward, *square(2))

    insert_gathers(gm, of_layers(gm), NO_LIMIT)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1])
        gathered = zero3.all_gather_wait(all_gather, [w1])
        w1_full: f32[4, 4] = getitem(gathered, 0)
        mm: f32[4, 4] = mm(x, w1_full)
        t: f32[4, 4] = t(w1_full)
        return [mm, t]
        """,
    )


def test_gathers_keep_the_order_they_are_given_in_and_none_is_left_out():
    gm = partitioned_graph(lambda x, w1, w2, w3: torch.mm(torch.neg(x), w1) @ w2, *square(4))
    groups = {name: {"group": number} for number, name in enumerate(("w1", "w2", "w3"))}
    in_reverse = dict(reversed(of_layers(gm, **groups).items()))

    insert_gathers(gm, in_reverse, NO_LIMIT)
    chain_reductions(gm)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        w3: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w3])
        neg: f32[4, 4] = neg(x)
        all_gather_1: i64[1] = zero3.all_gather_start([w2], all_gather)
        gathered = zero3.all_gather_wait(all_gather, [w3], all_gather_1)
        token: f32[0] = getitem(gathered, 1)
        w3_full: f32[4, 4] = getitem(gathered, 0)
        all_gather_2: i64[1] = zero3.all_gather_start([w1], token)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w2], all_gather_2)
        w2_full: f32[4, 4] = getitem(gathered_1, 0)
        gathered_2 = zero3.all_gather_wait(all_gather_2, [w1])
        w1_full: f32[4, 4] = getitem(gathered_2, 0)
        mm: f32[4, 4] = mm(neg, w1_full)
        matmul: f32[4, 4] = matmul(mm, w2_full)
        return matmul
        """,
    )


def test_a_graph_without_parameters_stays_as_it_is():
    gm = partitioned_graph(forward_that_saves, *square(3))
    before = graph_text(gm)

    insert_gathers(gm, {}, NO_LIMIT)
    chain_reductions(gm)
    reduce(gm, {})

    assert graph_text(gm) == before


def gathers_of(gm):
    return gm.graph.find_nodes(op="call_function", target=ops.all_gather_start.default)


@st.composite
def models(draw):
    """A chain of ops on parameters p0, p1, ... in any order: (gm, facts by input, bucket_bytes)."""
    count = draw(st.integers(1, 6))
    limit = draw(st.integers(1, 100))
    uses = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["mm", "add", "view", "pair"]),
                st.integers(0, count - 1),
                st.integers(0, count - 1),
            ),
            max_size=12,
        )
    )
    saved = draw(st.sets(st.integers(0, count - 1)))

    graph = fx.Graph()
    x = graph.placeholder("x")
    parameters = [graph.placeholder(f"p{i}") for i in range(count)]
    graph.placeholder("unrelated")
    for kind, i, j in uses:
        if kind == "mm":
            x = graph.call_function(torch.mm, (x, parameters[i]))
        elif kind == "add":
            x = graph.call_function(torch.add, (x, parameters[i]))
        elif kind == "view":
            x = graph.call_function(torch.add, (x, graph.call_function(torch.t, (parameters[i],))))
        else:
            both = graph.call_function(torch.mm, (parameters[i], parameters[j]))
            x = graph.call_function(torch.add, (x, both))
    graph.output((x, *(parameters[i] for i in sorted(saved))))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    with FakeTensorMode() as mode:
        FakeTensorProp(gm, mode).propagate(*(torch.empty(2, 2) for _ in range(count + 2)))
    known = {
        node: facts(
            node.name,
            group=draw(st.integers(0, 2)),
            nbytes=draw(st.integers(1, 100)),
            reshard_after_forward=draw(st.sampled_from([True, False, None])),
        )
        for node in parameters
    }
    for node, of_parameter in known.items():
        node.meta[PARAMETER] = of_parameter
    return gm, known, limit


class Gathering(fx.Interpreter):
    """Runs a graph whose gathers find the full tensors of ``fulls``, and whose inputs are empty."""

    def __init__(self, gm, fulls):
        super().__init__(gm)
        self.fulls = fulls

    def call_function(self, target, args, kwargs):
        if target is ops.all_gather_start.default:
            return [self.fulls[given.removeprefix("placeholder ")] for given in args[0]]
        if target is ops.all_gather_wait.default:
            return [*args[0], torch.empty(0)]
        return super().call_function(target, args, kwargs)


@settings(max_examples=150, deadline=None)
@given(models())
def test_whatever_the_order_of_uses_each_parameter_is_gathered_once_before_them(model):
    gm, known, bucket_bytes = model
    by_fqn = {f.fqn: f for f in known.values()}
    fulls = {f.fqn: torch.randn(2, 2, dtype=torch.float64) for f in known.values()}
    x = torch.randn(2, 2, dtype=torch.float64)
    expected = gm(x, *fulls.values(), None)

    keep = choose_kept(known, bucket_bytes)
    insert_gathers(gm, known, bucket_bytes, keep)
    chain_reductions(gm)

    buckets = [fqns_of(gather) for gather in gathers_of(gm)]
    gathered = [fqn for bucket in buckets for fqn in bucket]
    assert gathered == list(by_fqn), "all of them, in their order"
    for bucket in buckets:
        assert len({by_fqn[fqn].group for fqn in bucket}) == 1
        assert len(bucket) == 1 or sum(by_fqn[fqn].nbytes for fqn in bucket) <= bucket_bytes
    for node in known:
        assert all(
            user.target in (ops.all_gather_start.default, ops.all_gather_wait.default)
            or user.op == "output"
            for user in node.users
        )
    # A graph whose uses come after their gathers runs, although the inputs hold no data.
    actual = Gathering(gm, fulls).run(x, *(f"placeholder {fqn}" for fqn in fulls), None)
    assert torch.equal(actual[0], expected[0])
    for saved, full in zip(actual[1:], expected[1:], strict=True):
        (fqn,) = (fqn for fqn in fulls if fulls[fqn] is full)
        keeps = any(node.name == fqn for node in keep)
        assert (saved is full) if keeps else (saved == f"placeholder {fqn}")
        chosen = by_fqn[fqn].reshard_after_forward
        assert chosen is None or keeps == (not chosen)
    open_ones = [known[node] for node in keep if known[node].reshard_after_forward is None]
    assert sum(parameter.nbytes for parameter in open_ones) <= bucket_bytes


# ---- settle_backward_gathers


def joint_graph(function, *inputs):
    """A joint graph, whose inputs w1, w2, ... are parameters and t1, t2, ... tangents."""
    gm = make_fx(function)(*inputs)
    names = inspect.signature(function).parameters
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = name
    gm.recompile()
    return gm


def tangents_of(gm):
    return [n for n in gm.graph.find_nodes(op="placeholder") if n.name.startswith("t")]


def policies(gm):
    """The nodes that the pass has tagged."""
    tagged = [n for n in gm.graph.nodes if "recompute" in n.meta]
    return "\n".join(f"{n.meta['recompute'].name.lower()}: {node_text(n)}" for n in tagged)


def linear_in_bf16(x, w1, t1):
    weight = w1.bfloat16()
    y = x @ weight.t()
    return y, t1 @ weight, t1.t() @ x


@pytest.mark.smoke
def test_a_function_of_a_parameter_is_computed_again():
    x, w, t = torch.ones(2, 4).bfloat16(), torch.ones(4, 4), torch.ones(2, 4).bfloat16()
    gm = joint_graph(linear_in_bf16, x, w, t)

    settle_backward_gathers(gm, of_layers(gm), tangents_of(gm), 1)

    assert_text(
        gm,
        """\
        must_recompute: _to_copy: bf16[4, 4] = aten._to_copy(w1, dtype=bfloat16)
        must_recompute: t: bf16[4, 4] = aten.t(_to_copy)
        """,
        policies(gm),
    )


def test_a_reduction_of_a_parameter_is_left_to_the_partitioner():
    def weight_norm(x, w1, t1):
        weight = w1 / w1.norm()
        return x @ weight, t1 @ weight.t()

    gm = joint_graph(weight_norm, torch.ones(2, 4), torch.ones(4, 4), torch.ones(2, 4))

    settle_backward_gathers(gm, of_layers(gm), tangents_of(gm), 1)

    assert_text(
        gm,
        """\
        must_recompute: div: f32[4, 4] = aten.div.Tensor(w1, linalg_vector_norm)
        must_recompute: t: f32[4, 4] = aten.t(div)
        """,
        policies(gm),
    )


@pytest.mark.smoke
def test_backward_gets_all_but_tables_of_embeddings():
    def embed(ids, w1, w2, w3, t1):
        x = torch.nn.functional.embedding(ids, w1)
        y = torch.sigmoid(x + w2) @ w3
        return y, t1 @ w3.t()

    inputs = torch.zeros(3, dtype=torch.int64), *torch.ones(3, 4, 4), torch.ones(3, 4)
    gm = joint_graph(lambda ids, w1, w2, w3, t1: embed(ids, w1, w2[:3], w3, t1), *inputs)
    parameters = of_layers(gm, w1={"only_embeds": True})

    settle_backward_gathers(gm, parameters, tangents_of(gm), 1)

    assert_text(
        gm,
        """\
        must_recompute: slice_1: f32[3, 4] = aten.slice.Tensor(w2, 0, 0, 3)
        must_save: embedding: f32[3, 4] = aten.embedding(w1, ids)
        must_recompute: t: f32[4, 4] = aten.t(w3)
        """,
        policies(gm),
    )
    (needs,) = gm.graph.find_nodes(op="call_function", target=needed_in_backward)
    assert [node.name for node in needs.args[1]] == ["w2", "w3"]
    drop_needs(gm)
    assert not gm.graph.find_nodes(op="call_function", target=needed_in_backward)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_by_position_are_saved_however_many(rows):
    def embed(x, w1, t1):
        positions = torch.nn.functional.embedding(torch.arange(len(x)), w1)
        return x * positions, t1 * positions

    gm = joint_graph(embed, torch.ones(rows, 4), torch.ones(4, 4), torch.ones(rows, 4))

    settle_backward_gathers(gm, of_layers(gm, w1={"only_embeds": True}), tangents_of(gm), 1)

    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert node.meta["recompute"] is CheckpointPolicy.MUST_SAVE


def test_what_a_checkpoint_computes_again_or_what_is_kept_is_left_alone():
    x, w, t = torch.ones(2, 4), torch.ones(4, 4), torch.ones(2, 4)
    gm = joint_graph(lambda x, w1, t1: (torch.sigmoid(x + w1[:2]), t1), x, w, t)
    (add,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    add.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    settle_backward_gathers(gm, of_layers(gm, w1={"only_embeds": True}), tangents_of(gm), 1)
    assert add.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE

    gm = joint_graph(linear_in_bf16, x.bfloat16(), w, t.bfloat16())
    settle_backward_gathers(
        gm, of_layers(gm, w1={"reshard_after_forward": False}), tangents_of(gm), 1
    )
    assert not any("recompute" in node.meta for node in gm.graph.nodes)


def test_what_is_random_is_not_a_function_of_a_parameter():
    def drop(x, w1, t1):
        weight, _ = torch.native_dropout(w1, 0.5, True)
        return x @ weight, t1 @ weight.t()

    gm = joint_graph(drop, torch.ones(2, 4), torch.ones(4, 4), torch.ones(2, 4))

    settle_backward_gathers(gm, of_layers(gm), tangents_of(gm), 1)

    assert_text(
        gm,
        """\
        x: f32[2, 4]
        w1: f32[4, 4]
        t1: f32[2, 4]
        native_dropout = aten.native_dropout(w1, 0.5, True)
        getitem: f32[4, 4] = getitem(native_dropout, 0)
        getitem_1: b8[4, 4] = getitem(native_dropout, 1)
        mm: f32[2, 4] = aten.mm(x, getitem)
        t: f32[4, 4] = aten.t(getitem)
        mm_1: f32[2, 4] = aten.mm(t1, t)
        needed_in_backward: f32[2, 4] = needed_in_backward(mm_1, [w1], [], [t1])
        return [mm, needed_in_backward]
        """,
        policies(gm),
    )


# ---- insert_reduces


def reduce(gm, gradients):
    """``insert_reduces``, of parameters whose placeholders are inputs behind the others."""
    placeholders = {}
    for of_parameter in gradients.values():
        with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
            node = gm.graph.placeholder(of_parameter.fqn.replace(".", "_"))
        node.meta[PARAMETER] = of_parameter
        placeholders[of_parameter.fqn] = node
    insert_reduces(gm, gradients, placeholders)


def test_reductions_keep_the_order_they_are_given_in():
    def backward(x, tangent):
        return torch.mm(x, tangent), torch.sum(tangent, 0), torch.neg(tangent)

    gm = partitioned_graph(backward, *square(2))

    reduce(gm, {1: facts("b"), 2: facts("c"), 0: facts("a")})
    chain_reductions(gm)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        tangent: f32[4, 4]
        b
        c
        a
        mm: f32[4, 4] = mm(x, tangent)
        sum_1: f32[4] = sum(tangent, 0)
        reduce_grad: f32[0] = zero3.reduce_grad(sum_1, b)  # f32 -> any -> f32
        neg: f32[4, 4] = neg(tangent)
        reduce_grad_1: f32[0] = zero3.reduce_grad(neg, c, reduce_grad)  # f32 -> any -> f32
        reduce_grad_2: f32[0] = zero3.reduce_grad(mm, a, reduce_grad_1)  # f32 -> any -> f32
        return [None, None, None]
        """,
    )


@pytest.mark.smoke
def test_a_gradient_is_reduced_as_soon_as_it_exists():
    def backward(x, w, tangent):
        grad_w = torch.mm(torch.t(x), tangent)
        grad_b = torch.sum(tangent, 0)
        grad_x = torch.mm(tangent, torch.t(w))
        return grad_w, grad_b, grad_x

    gm = partitioned_graph(backward, *square(3))

    reduce(gm, {0: facts("fc.weight"), 1: facts("fc.bias")})

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w: f32[4, 4]
        tangent: f32[4, 4]
        fc_weight
        fc_bias
        t: f32[4, 4] = t(x)
        mm: f32[4, 4] = mm(t, tangent)
        reduce_grad: f32[0] = zero3.reduce_grad(mm, fc_weight)  # f32 -> any -> f32
        sum_1: f32[4] = sum(tangent, 0)
        reduce_grad_1: f32[0] = zero3.reduce_grad(sum_1, fc_bias)  # f32 -> any -> f32
        t_1: f32[4, 4] = t(w)
        mm_1: f32[4, 4] = mm(tangent, t_1)
        return [None, None, mm_1]
        """,
    )


@pytest.mark.smoke
def test_a_gradient_that_is_a_graph_input_is_reduced_first():
    gm = partitioned_graph(lambda x, tangent: (torch.mul(x, tangent), tangent), *square(2))

    reduce(gm, {1: facts("bias")})

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        tangent: f32[4, 4]
        bias
        reduce_grad: f32[0] = zero3.reduce_grad(tangent, bias)  # f32 -> any -> f32
        mul: f32[4, 4] = mul(x, tangent)
        return [mul, None]
        """,
    )


def test_a_parameter_without_a_gradient_is_not_reduced():
    gm = partitioned_graph(lambda tangent: (None, torch.neg(tangent)), *square(1))

    reduce(gm, {0: facts("unused")})

    assert not reduces_of(gm)
    assert gm.graph.output_node().args[0][0] is None


def test_one_tensor_that_is_the_gradient_of_two_parameters_is_reduced_for_both():
    def backward(tangent):
        grad = torch.neg(tangent)
        return grad, grad

    gm = partitioned_graph(backward, *square(1))

    reduce(gm, {0: facts("a"), 1: facts("b")})

    assert sorted(fqns_of(node) for node in reduces_of(gm)) == [["a"], ["b"]]
    assert gm.graph.output_node().args[0] == (None, None)


def test_dead_code_elimination_keeps_the_reductions():
    gm = partitioned_graph(lambda tangent: (torch.neg(tangent),), *square(1))
    reduce(gm, {0: facts("w")})

    gm.graph.eliminate_dead_code()

    assert len(reduces_of(gm)) == 1


def test_the_cast_to_the_leafs_dtype_is_left_to_the_runtime():
    def backward(x, tangent):
        low = torch.ops.aten.mm(x, tangent).bfloat16()
        return low.float(), low.double()

    gm = make_fx(backward)(torch.ones(4, 4), torch.ones(4, 4))

    contracts = {"grad_dtype": torch.float32, "reduce_dtype": torch.bfloat16}
    reduce(gm, {0: facts("a", **contracts), 1: facts("b", **contracts)})

    assert_text(
        gm,
        """\
        x_1: f32[4, 4]
        tangent_1: f32[4, 4]
        a
        b
        mm: f32[4, 4] = aten.mm(x_1, tangent_1)
        _to_copy: bf16[4, 4] = aten._to_copy(mm, dtype=bfloat16)
        reduce_grad: bf16[0] = zero3.reduce_grad(_to_copy, a)  # bf16 -> f32 -> bf16
        _to_copy_1: f32[4, 4] = aten._to_copy(_to_copy, dtype=float32)
        _to_copy_2: f64[4, 4] = aten._to_copy(_to_copy, dtype=float64)
        reduce_grad_1: f64[0] = zero3.reduce_grad(_to_copy_2, b)  # f64 -> f32 -> bf16
        return [None, None]
        """,
    )


LARGE = 1 << 20


def reductions_of(gm):
    """By FQN, the op that reduces it."""
    nodes = [node for node in gm.graph.nodes if "zero3.reduce" in str(node.target)]
    return {fqns_of(node)[0]: node.target.name().removeprefix("zero3::") for node in nodes}


@pytest.mark.smoke
def test_a_large_product_and_an_embeddings_rows_are_left_to_the_runtime():
    def backward(x, tangent, at, rows):
        mask = (at != 3).unsqueeze(-1)
        zeros = torch.zeros(9, 4)
        table = torch.ops.aten._unsafe_masked_index_put_accumulate(zeros, mask, [at], rows)
        return torch.ops.aten.mm(x.t(), tangent), table

    inputs = torch.ones(2, 4), torch.ones(2, 5), torch.tensor([1, 3]), torch.ones(2, 4)
    gm = make_fx(backward)(*inputs)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.zeros.default):
        node.target, node.args = torch.ops.aten.full.default, ([9, 4], 0)

    reduce(gm, {0: facts("fc", nbytes=LARGE), 1: facts("rows", nbytes=LARGE)})
    gm.graph.eliminate_dead_code()

    assert_text(
        gm,
        """\
        x_1: f32[2, 4]
        tangent_1: f32[2, 5]
        at_1: i64[2]
        rows_1: f32[2, 4]
        fc
        rows
        ne: b8[2] = aten.ne.Scalar(at_1, 3)
        unsqueeze: b8[2, 1] = aten.unsqueeze(ne, -1)
        full_default: f32[] = aten.full([], 0.0, dtype=float32, device=device(type='cpu'))
        where_self: f32[2, 4] = aten.where.self(unsqueeze, rows_1, full_default)
        t: f32[4, 2] = aten.t(x_1)
        reduce_mm: f32[0] = zero3.reduce_mm([t, tangent_1], fc)  # f32 -> any -> f32
        reduce_rows: f32[0] = zero3.reduce_rows([at_1, where_self], rows)  # f32 -> any -> f32
        return [None, None]
        """,
    )


def _transposed_twice(x, tangent):
    aten = torch.ops.aten
    return (aten.t(aten.t(aten.mm(x.t(), tangent))),)


def _transposed_twice_and_read(x, tangent):
    aten = torch.ops.aten
    product = aten.mm(x.t(), tangent)
    return aten.t(aten.t(product)), product.sum()


def _transposed_twice_and_read_between(x, tangent):
    aten = torch.ops.aten
    between = aten.t(aten.mm(x.t(), tangent))
    return aten.t(between), between.sum()


@pytest.mark.parametrize(
    ("backward", "reduction"),
    [
        (_transposed_twice, "reduce_mm"),
        (_transposed_twice_and_read, "reduce_grad"),
        (_transposed_twice_and_read_between, "reduce_grad"),
    ],
)
def test_two_transpositions_of_a_product_are_none(backward, reduction):
    gm = make_fx(backward)(torch.ones(2, 4), torch.ones(2, 5))

    reduce(gm, {0: facts("fc", nbytes=LARGE)})

    assert reductions_of(gm) == {"fc": reduction}
    products = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) == (reduction == "reduce_grad")


def _product(x, tangent):
    return (torch.ops.aten.mm(x, tangent),)


@pytest.mark.parametrize(
    ("backward", "changes"),
    [
        (_product, {"nbytes": 64}),
        (_product, {"grad_dtype": torch.bfloat16}),
        (_product, {"reduce_dtype": torch.bfloat16}),
        (lambda x, tangent: (torch.ops.aten.mm(x, tangent).neg(),), {}),
        (lambda x, tangent: (product := torch.ops.aten.mm(x, tangent), product.relu()), {}),
        (lambda x, tangent: (product := torch.ops.aten.mm(x, tangent), product), {}),
    ],
    ids=["small", "cast to the leaf", "cast to the wire", "negated", "read", "returned"],
)
def test_other_gradients_are_computed_in_the_graph(backward, changes):
    gm = make_fx(backward)(torch.ones(4, 4), torch.ones(4, 4))
    reduce(gm, {0: facts("fc", **{"nbytes": LARGE, **changes})})
    assert reductions_of(gm) == {"fc": "reduce_grad"}


def _put(into, indices, rows):
    mask = torch.ones_like(rows, dtype=torch.bool)
    return torch.ops.aten._unsafe_masked_index_put_accumulate(into, mask, indices, rows)


@pytest.mark.parametrize(
    "backward",
    [
        lambda at, rows: (_put(torch.full((9, 4), 1.0), [at], rows),),
        lambda at, rows: (_put(rows.new_ones(9, 4), [at], rows),),
        lambda at, rows: (_put(torch.full((9, 9, 4), 0.0), [at, at], rows),),
        lambda at, rows: (_put(torch.full((9, 4, 1), 0.0), [at], rows.unsqueeze(-1)),),
    ],
    ids=["into ones", "into something", "two indices", "three dimensions"],
)
def test_what_only_resembles_an_embeddings_gradient_is_computed_in_the_graph(backward):
    gm = make_fx(backward)(torch.tensor([1, 3]), torch.ones(2, 4))
    reduce(gm, {0: facts("table", nbytes=LARGE)})
    assert reductions_of(gm) == {"table": "reduce_grad"}


# ---- widen_weight_gradients


def linear_backward(x, weight, tangent):
    grad_weight = torch.ops.aten.mm(tangent.t(), x)
    return tangent @ weight, grad_weight.float(), tangent.sum(0).float()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_matmul_that_computes_a_gradient_alone_is_widened(device):
    with FakeTensorMode():
        inputs = [torch.empty(4, 4, dtype=torch.bfloat16, device=device) for _ in range(3)]
        gm = make_fx(linear_backward)(*inputs)
    gradients = {1: facts("weight", grad_dtype=torch.float32), 2: facts("bias", grad_dtype=None)}

    widen_weight_gradients(gm, gradients)

    if device == "cpu":
        assert_text(
            gm,
            """\
        x_1: bf16[4, 4]
        weight_1: bf16[4, 4]
        tangent_1: bf16[4, 4]
        t: bf16[4, 4] = aten.t(tangent_1)
        t_fp32: f32[4, 4] = prims.convert_element_type(t, float32)
        x_1_fp32: f32[4, 4] = prims.convert_element_type(x_1, float32)
        mm_fp32: f32[4, 4] = aten.mm(t_fp32, x_1_fp32)
        mm_1: bf16[4, 4] = aten.mm(tangent_1, weight_1)
        sum_1: bf16[4] = aten.sum.dim_IntList(tangent_1, [0])
        _to_copy_1: f32[4] = aten._to_copy(sum_1, dtype=float32)
        return [mm_1, mm_fp32, _to_copy_1]
        """,
        )
    else:
        assert_text(
            gm,
            """\
        x_1: bf16[4, 4]
        weight_1: bf16[4, 4]
        tangent_1: bf16[4, 4]
        t: bf16[4, 4] = aten.t(tangent_1)
        mm_fp32: f32[4, 4] = aten.mm.dtype(t, x_1, float32)
        mm_1: bf16[4, 4] = aten.mm(tangent_1, weight_1)
        sum_1: bf16[4] = aten.sum.dim_IntList(tangent_1, [0])
        _to_copy_1: f32[4] = aten._to_copy(sum_1, dtype=float32)
        return [mm_1, mm_fp32, _to_copy_1]
        """,
        )


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_matmul_whose_gradient_is_cast_otherwise_is_not_widened(grad_dtype):
    gm = make_fx(lambda x, t: [(x.t() @ t).to(grad_dtype)])(*torch.ones(2, 4, 4).bfloat16())
    before = graph_text(gm)
    widen_weight_gradients(gm, {0: facts("weight", grad_dtype=grad_dtype)})
    assert graph_text(gm) == before


def test_a_matmul_that_others_read_too_is_not_widened():
    def backward(x, t):
        product = x.t() @ t
        return product, product.relu()

    gm = make_fx(backward)(*torch.ones(2, 4, 4).bfloat16())
    before = graph_text(gm)
    widen_weight_gradients(gm, {0: facts("weight", grad_dtype=None)})
    assert graph_text(gm) == before


def reduces_of(gm):
    return gm.graph.find_nodes(op="call_function", target=ops.reduce_grad.default)


# ---- chain_reductions


@pytest.mark.smoke
def test_each_collective_takes_the_token_of_the_one_of_its_kind_before_it():
    def backward(x, h, w1, w2, tangent):
        grad_h = torch.mm(tangent, torch.t(w2))
        grad_w2 = torch.mm(torch.t(h), tangent)
        grad_x = torch.mm(grad_h, torch.t(w1))
        grad_w1 = torch.mm(torch.t(x), grad_h)
        return grad_x, grad_w1, grad_w2

    gm = partitioned_graph(backward, *square(5))
    insert_gathers(gm, dict(reversed(of_layers(gm, w2={"group": 1}).items())), NO_LIMIT)
    reduce(gm, {2: facts("fc2"), 1: facts("fc1")})

    chain_reductions(gm)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        h: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        tangent: f32[4, 4]
        fc2
        fc1
        all_gather: i64[1] = zero3.all_gather_start([w2])
        all_gather_1: i64[1] = zero3.all_gather_start([w1], all_gather)
        gathered = zero3.all_gather_wait(all_gather, [w2], all_gather_1)
        w2_full: f32[4, 4] = getitem(gathered, 0)
        t: f32[4, 4] = t(w2_full)
        mm: f32[4, 4] = mm(tangent, t)
        t_1: f32[4, 4] = t(h)
        mm_1: f32[4, 4] = mm(t_1, tangent)
        reduce_grad: f32[0] = zero3.reduce_grad(mm_1, fc2)  # f32 -> any -> f32
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w1])
        w1_full: f32[4, 4] = getitem(gathered_1, 0)
        t_2: f32[4, 4] = t(w1_full)
        mm_2: f32[4, 4] = mm(mm, t_2)
        t_3: f32[4, 4] = t(x)
        mm_3: f32[4, 4] = mm(t_3, mm)
        reduce_grad_1: f32[0] = zero3.reduce_grad(mm_3, fc1, reduce_grad)  # f32 -> any -> f32
        return [mm_2, None, None]
        """,
    )


def test_reductions_that_compute_what_they_send_are_links_of_the_chain_too():
    def backward(x, tangent):
        mm = torch.ops.aten.mm
        return mm(x.t(), tangent), tangent.sum(0), mm(tangent.t(), x)

    gm = make_fx(backward)(torch.ones(2, 4), torch.ones(2, 5))
    large = {"nbytes": LARGE}
    reduce(gm, {0: facts("one", **large), 1: facts("bias"), 2: facts("other", **large)})

    chain_reductions(gm)

    links = [node for node in gm.graph.nodes if node.target in REDUCTIONS]
    assert list(reductions_of(gm).values()) == ["reduce_mm", "reduce_grad", "reduce_mm"]
    assert [link.args[2] for link in links[1:]] == links[:-1]


@pytest.mark.smoke
def test_the_chain_follows_gathers_and_leaves_no_token_unused():
    gm = partitioned_graph(three_layers, *square(4))
    parameters = of_layers(gm, w2={"group": 1}, w3={"group": 2})
    insert_gathers(gm, parameters, NO_LIMIT)

    chain_reductions(gm)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        w3: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1])
        all_gather_1: i64[1] = zero3.all_gather_start([w2], all_gather)
        gathered = zero3.all_gather_wait(all_gather, [w1], all_gather_1)
        token: f32[0] = getitem(gathered, 1)
        w1_full: f32[4, 4] = getitem(gathered, 0)
        mm: f32[4, 4] = mm(x, w1_full)
        all_gather_2: i64[1] = zero3.all_gather_start([w3], token)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w2], all_gather_2)
        w2_full: f32[4, 4] = getitem(gathered_1, 0)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        gathered_2 = zero3.all_gather_wait(all_gather_2, [w3])
        w3_full: f32[4, 4] = getitem(gathered_2, 0)
        mm_2: f32[4, 4] = mm(mm_1, w3_full)
        return mm_2
        """,
    )
