"""insert_gathers, and what is copied for its sake: where gathers stand in a graph."""

import pytest
import torch
from support.pass_graphs import (
    NO_LIMIT,
    assert_text,
    of_layers,
    partitioned_graph,
    reduce,
    square,
    three_layers,
)

from deepcompile_zero3.graph.text import graph_text
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.passes.gather import clone_returned_parameters, insert_gathers
from deepcompile_zero3.passes.keep import choose_kept
from deepcompile_zero3.runtime import ops


@pytest.mark.smoke
def test_neighbors_of_one_group_share_a_gather_before_the_first_use():
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
    parameters = of_layers(gm, w2={"process_group": 1}, w3={"process_group": 1})

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
        token: f32[0] = getitem(gathered, 1)
        w1_full: f32[4, 4] = getitem(gathered, 0)
        mm: f32[4, 4] = mm(x, w1_full)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w2, w3], token)
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
        token: f32[0] = getitem(gathered, 2)
        w1_full: f32[4, 4] = getitem(gathered, 0)
        w2_full: f32[4, 4] = getitem(gathered, 1)
        mm: f32[4, 4] = mm(x, w1_full)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w3], token)
        w3_full: f32[4, 4] = getitem(gathered_1, 0)
        mm_2: f32[4, 4] = mm(mm_1, w3_full)
        return mm_2
        """,
    )


@pytest.mark.smoke
def test_as_many_gathers_are_in_flight_as_are_wanted():
    gm = partitioned_graph(three_layers, *square(4))

    insert_gathers(gm, of_layers(gm), bucket_bytes=64, ahead=2)

    assert_text(
        gm,
        """\
        x: f32[4, 4]
        w1: f32[4, 4]
        w2: f32[4, 4]
        w3: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1])
        all_gather_1: i64[1] = zero3.all_gather_start([w2], all_gather)
        all_gather_2: i64[1] = zero3.all_gather_start([w3], all_gather_1)
        gathered = zero3.all_gather_wait(all_gather, [w1], all_gather_2)
        token: f32[0] = getitem(gathered, 1)
        w1_full: f32[4, 4] = getitem(gathered, 0)
        mm: f32[4, 4] = mm(x, w1_full)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w2], token)
        token_1: f32[0] = getitem(gathered_1, 1)
        w2_full: f32[4, 4] = getitem(gathered_1, 0)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        gathered_2 = zero3.all_gather_wait(all_gather_2, [w3], token_1)
        w3_full: f32[4, 4] = getitem(gathered_2, 0)
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
        token_1: f32[0] = getitem(gathered_1, 1)
        w2_full: f32[4, 4] = getitem(gathered_1, 0)
        mm_1: f32[4, 4] = mm(mm, w2_full)
        gathered_2 = zero3.all_gather_wait(all_gather_2, [w3], token_1)
        w3_full: f32[4, 4] = getitem(gathered_2, 0)
        mm_2: f32[4, 4] = mm(mm_1, w3_full)
        return mm_2
        """,
    )


def forward_that_saves(x, w1, w2):
    h = torch.mm(x, w1)
    return torch.mm(h, w2), x, h, w1, w2


@pytest.mark.smoke
def test_a_parameter_that_forward_saves_stays_a_placeholder():
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


def test_a_parameter_that_forward_returns_is_gathered_and_copied():
    gm = partitioned_graph(lambda w1, w2: (w1, w2), *square(2))
    parameters = of_layers(gm)

    clone_returned_parameters(gm, parameters, saved={1})
    insert_gathers(gm, parameters, NO_LIMIT)

    assert_text(
        gm,
        """\
        w1: f32[4, 4]
        w2: f32[4, 4]
        all_gather: i64[1] = zero3.all_gather_start([w1, w2])
        gathered = zero3.all_gather_wait(all_gather, [w1, w2])
        w1_full: f32[4, 4] = getitem(gathered, 0)
        w2_full: f32[4, 4] = getitem(gathered, 1)
        clone_default: f32[4, 4] = aten.clone(w1_full)
        return [clone_default, w2]
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

    insert_gathers(gm, dict(reversed(of_layers(gm, w2={"process_group": 1}).items())), NO_LIMIT)

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
        token: f32[0] = getitem(gathered, 1)
        w2_full: f32[4, 4] = getitem(gathered, 0)
        t_1: f32[4, 4] = t(w2_full)
        mm_1: f32[4, 4] = mm(tangent, t_1)
        t_2: f32[4, 4] = t(x)
        mm_2: f32[4, 4] = mm(t_2, mm_1)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [w1], token)
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
    groups = {name: {"process_group": number} for number, name in enumerate(("w1", "w2", "w3"))}
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
        token_1: f32[0] = getitem(gathered_1, 1)
        w2_full: f32[4, 4] = getitem(gathered_1, 0)
        gathered_2 = zero3.all_gather_wait(all_gather_2, [w1], token_1)
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
