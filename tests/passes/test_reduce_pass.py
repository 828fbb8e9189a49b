"""insert_reduces, widen_weight_gradients and chain_reductions: how gradients leave a graph."""

import pytest
import torch
from support.pass_graphs import (
    LARGE,
    assert_text,
    facts,
    partitioned_graph,
    reduce,
    reductions_of,
    square,
)
from torch.fx.experimental.proxy_tensor import make_fx

from deepcompile_zero3.graph.metadata import fqns_of
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.runtime import ops

# ---- insert_reduces


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

    contracts = {"leaf_dtype": torch.float32, "wire_dtype": torch.bfloat16}
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
        (_product, {"leaf_dtype": torch.bfloat16}),
        (_product, {"wire_dtype": torch.bfloat16}),
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
def test_gradients_that_resemble_an_embeddings_are_computed_in_the_graph(backward):
    gm = make_fx(backward)(torch.tensor([1, 3]), torch.ones(2, 4))
    reduce(gm, {0: facts("table", nbytes=LARGE)})
    assert reductions_of(gm) == {"table": "reduce_grad"}


# ---- widen_weight_gradients


def reduces_of(gm):
    return gm.graph.find_nodes(op="call_function", target=ops.reduce_grad.default)
