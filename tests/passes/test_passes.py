"""The passes ahead of partitioning: lifting, declared dtypes, what backward gets."""

import inspect
import operator

import pytest
import torch
from support.pass_graphs import assert_text, facts, of_layers
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from deepcompile_zero3.graph.text import node_text
from deepcompile_zero3.passes.backward_gathers import decide_backward_gathers
from deepcompile_zero3.passes.contract import declare_grad_dtypes
from deepcompile_zero3.passes.lift import lift_unshards, uses_of
from deepcompile_zero3.passes.markers import drop_needed_in_backward, needed_in_backward
from deepcompile_zero3.runtime import ops


@pytest.fixture
def x():
    return torch.ones(2, 4)


@pytest.fixture
def w():
    return torch.ones(4, 4, requires_grad=True)


def dynamo_graph(function, *args):
    """Returns the graph that ``torch.compile`` passes to a backend."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return lambda *_: tuple(torch.zeros(()) for _ in gm.graph.output_node().args[0])

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return graphs[0]


# ---- lift_unshards


def layer(x, w):
    weight = ops.unshard.default(w, "any")
    return torch.relu(torch.mm(x, weight))


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
        weight = zero3.unshard(l_w_, 'any', True)
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
            2: facts("kept", leaf_dtype=None, declares_grad_dtype=True),
            3: facts("fp32", leaf_dtype=torch.float32, declares_grad_dtype=True),
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


# ---- decide_backward_gathers


def joint_graph(function, *inputs):
    """Returns a joint graph with parameters w1, w2, ... and tangents t1, t2, ... as inputs."""
    gm = make_fx(function)(*inputs)
    names = inspect.signature(function).parameters
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = name
    gm.recompile()
    return gm


def tangents_of(gm):
    return [n for n in gm.graph.find_nodes(op="placeholder") if n.name.startswith("t")]


def policies(gm):
    """Returns the nodes that the pass has tagged."""
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

    decide_backward_gathers(gm, of_layers(gm), tangents_of(gm), 1)

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

    decide_backward_gathers(gm, of_layers(gm), tangents_of(gm), 1)

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

    decide_backward_gathers(gm, parameters, tangents_of(gm), 1)

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
    drop_needed_in_backward(gm)
    assert not gm.graph.find_nodes(op="call_function", target=needed_in_backward)


def test_functions_of_spared_parameters_and_activations_are_saved():
    def trunk(x, w1, w2, t1):
        h = torch.nn.functional.layer_norm(x @ w1.t(), (4,), w1[0])
        only_for_backward = h @ w1
        return h @ w2, t1 @ w2.t() * only_for_backward

    gm = joint_graph(trunk, torch.ones(2, 4), *torch.ones(2, 4, 4), torch.ones(2, 4))
    # As in a checkpoint, in which the blocks of these parameters have nothing to compute again.
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[:1]:
        node.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=1)
    parameters = of_layers(gm, w1={"is_spared": True})

    decide_backward_gathers(gm, parameters, tangents_of(gm), 1)

    assert_text(
        gm,
        """\
        must_recompute: t: f32[4, 4] = aten.t(w1)
        must_save: mm: f32[2, 4] = aten.mm(x, t)
        must_recompute: select: f32[4] = aten.select.int(w1, 0, 0)
        must_save: native_layer_norm = aten.native_layer_norm(mm, [4], select, None, 1e-05)
        must_save: mm_1: f32[2, 4] = aten.mm(getitem, w1)
        must_save: saved_for_backward: f32[2, 4] = saved_for_backward(mm_1)
        must_recompute: t_1: f32[4, 4] = aten.t(w2)
        """,
        policies(gm),
    )
    (needs,) = gm.graph.find_nodes(op="call_function", target=needed_in_backward)
    assert [node.name for node in needs.args[1]] == ["w2"]


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_by_position_are_saved_however_many(rows):
    def embed(x, w1, t1):
        positions = torch.nn.functional.embedding(torch.arange(len(x)), w1)
        return x * positions, t1 * positions

    gm = joint_graph(embed, torch.ones(rows, 4), torch.ones(4, 4), torch.ones(rows, 4))

    decide_backward_gathers(gm, of_layers(gm, w1={"only_embeds": True}), tangents_of(gm), 1)

    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert node.meta["recompute"] is CheckpointPolicy.MUST_SAVE


def test_tags_of_a_checkpoint_and_kept_parameters_are_left_alone():
    x, w, t = torch.ones(2, 4), torch.ones(4, 4), torch.ones(2, 4)
    ids = torch.zeros(2, dtype=torch.int64)
    gm = joint_graph(lambda ids, w1, t1: (torch.nn.functional.embedding(ids, w1), t1), ids, w, t)
    (rows,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    rows.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    decide_backward_gathers(gm, of_layers(gm, w1={"only_embeds": True}), tangents_of(gm), 1)
    assert rows.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE

    gm = joint_graph(linear_in_bf16, x.bfloat16(), w, t.bfloat16())
    decide_backward_gathers(
        gm, of_layers(gm, w1={"reshard_after_forward": False}), tangents_of(gm), 1
    )
    assert not any("recompute" in node.meta for node in gm.graph.nodes)


def test_random_values_are_no_functions_of_a_parameter():
    def drop(x, w1, t1):
        weight, _ = torch.native_dropout(w1, 0.5, True)
        return x @ weight, t1 @ weight.t()

    gm = joint_graph(drop, torch.ones(2, 4), torch.ones(4, 4), torch.ones(2, 4))

    decide_backward_gathers(gm, of_layers(gm), tangents_of(gm), 1)

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
