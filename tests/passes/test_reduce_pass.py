"""insert_reduces, widen_weight_gradients and chain_reductions: how gradients leave a graph."""

import pytest
import torch
from support.pass_graphs import (
    NO_LIMIT,
    assert_text,
    facts,
    of_layers,
    partitioned_graph,
    reduce,
    square,
    three_layers,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from deepcompile_zero3.graph.metadata import fqns_of
from deepcompile_zero3.graph.text import graph_text
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.passes.gather import insert_gathers
from deepcompile_zero3.passes.widen import widen_weight_gradients
from deepcompile_zero3.runtime import REDUCTIONS, ops

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


LARGE = 1 << 20


def reductions_of(gm):
    """Returns the reduction's op by FQN."""
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


def linear_backward(x, weight, tangent):
    grad_weight = torch.ops.aten.mm(tangent.t(), x)
    return tangent @ weight, grad_weight.float(), tangent.sum(0).float()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_matmul_that_computes_a_gradient_alone_is_widened(device):
    with FakeTensorMode():
        inputs = [torch.empty(4, 4, dtype=torch.bfloat16, device=device) for _ in range(3)]
        gm = make_fx(linear_backward)(*inputs)
    gradients = {1: facts("weight", leaf_dtype=torch.float32), 2: facts("bias", leaf_dtype=None)}

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
    widen_weight_gradients(gm, {0: facts("weight", leaf_dtype=grad_dtype)})
    assert graph_text(gm) == before


def test_a_matmul_that_others_read_too_is_not_widened():
    def backward(x, t):
        product = x.t() @ t
        return product, product.relu()

    gm = make_fx(backward)(*torch.ones(2, 4, 4).bfloat16())
    before = graph_text(gm)
    widen_weight_gradients(gm, {0: facts("weight", leaf_dtype=None)})
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
    insert_gathers(gm, dict(reversed(of_layers(gm, w2={"process_group": 1}).items())), NO_LIMIT)
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
        token: f32[0] = getitem(gathered, 1)
        w2_full: f32[4, 4] = getitem(gathered, 0)
        t: f32[4, 4] = t(w2_full)
        mm: f32[4, 4] = mm(tangent, t)
        t_1: f32[4, 4] = t(h)
        mm_1: f32[4, 4] = mm(t_1, tangent)
        reduce_grad: f32[0] = zero3.reduce_grad(mm_1, fc2)  # f32 -> any -> f32
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w1], token)
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
    parameters = of_layers(gm, w2={"process_group": 1}, w3={"process_group": 2})
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
        token_1: f32[0] = getitem(gathered_1, 1)
        w2_full: f32[4, 4] = getitem(gathered_1, 0)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        gathered_2 = zero3.all_gather_wait(all_gather_2, [w3], token_1)
        w3_full: f32[4, 4] = getitem(gathered_2, 0)
        mm_2: f32[4, 4] = mm(mm_1, w3_full)
        return mm_2
        """,
    )
