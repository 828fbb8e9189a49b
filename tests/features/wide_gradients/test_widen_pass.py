"""widen_weight_gradients: products that compute a gradient in the dtype that it is reduced in."""

import pytest
import torch
from support.pass_graphs import assert_text, facts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from deepcompile_zero3.features.wide_gradients.widen import widen_weight_gradients
from deepcompile_zero3.graph.text import graph_text


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
