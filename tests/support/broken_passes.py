"""Passes that break a graph, each of them one promise."""

import operator
from types import SimpleNamespace

import torch
from torch import fx

from deepcompile_zero3 import graph_pass
from deepcompile_zero3.graph.metadata import KEEP
from deepcompile_zero3.runtime import ops

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
