"""chain_reductions and chain_gathers: the order of collectives is in the graph."""

import pytest
import torch
from support.pass_graphs import (
    LARGE,
    NO_LIMIT,
    assert_text,
    facts,
    of_layers,
    partitioned_graph,
    reduce,
    reductions_of,
    square,
    three_layers,
)
from torch.fx.experimental.proxy_tensor import make_fx

from deepcompile_zero3.graph.metadata import formats_of
from deepcompile_zero3.passes.chain import chain_gathers, chain_reductions
from deepcompile_zero3.passes.gather import insert_gathers
from deepcompile_zero3.runtime import REDUCTIONS, ops


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


def test_gathers_that_are_chained_anew_keep_their_formats():
    gm = partitioned_graph(three_layers, *square(4))
    formats = {"w1": "int8/4", "w3": "float8_e5m2/4"}
    parameters = of_layers(gm, **{name: {"gather_format": f} for name, f in formats.items()})
    insert_gathers(gm, parameters, bucket_bytes=64)

    chain_gathers(gm.graph)

    starts = gm.graph.find_nodes(op="call_function", target=ops.all_gather_start.default)
    assert [formats_of(start) for start in starts] == [["int8/4"], [""], ["float8_e5m2/4"]]
