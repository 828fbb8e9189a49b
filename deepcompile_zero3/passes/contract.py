"""Declares contracts in Dynamo's graph, or lets each unshard look up its own."""

from collections.abc import Iterator, Mapping

from torch import fx

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.graph.calls import bodies_of, graph_modules, inputs_of
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.torch_internals import compiler


def declare_grad_dtypes(gm: fx.GraphModule, parameters: Mapping[int, ParameterFacts]) -> None:
    """Declares the contract of each of ``parameters`` that needs it.

    ``parameters`` are keyed by position of the graph input. Modules may read another value in place
    of the input. Autograd sums the uses of that value first, so it gets the same contract.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    for position, facts in parameters.items():
        if not facts.declares_grad_dtype:
            continue
        places = {inputs[position]: inputs[-1]}
        if not facts.is_read_as_gathered:
            places |= {read: read for read in _reads(gm, inputs[position])}
        for node, place in places.items():
            with node.graph.inserting_after(place):
                node.graph.call_function(grad_dtype.declare, (node, facts.leaf_dtype))
    gm.graph.lint()
    for nested in graph_modules(gm):
        nested.recompile()


def _reads(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Yields the values that modules read in place of an input ``node`` of ``gm``.

    Includes those that are read inside of checkpoints.
    """
    for user in list(node.users):
        match user.target:
            case compiler.autograd_function_apply:  # the read of a scalar
                yield from user.users
            case compiler.tag_activation_checkpoint:
                for body in bodies_of(gm, user):
                    for read in inputs_of(body, user, node):
                        yield from _reads(body, read)
            case torch_internals.HigherOrderOperator():
                continue  # autograd sees only what it returns
            case _:
                yield user


def forget_contracts(gm: fx.GraphModule) -> None:
    """Makes each ``zero3.unshard`` of a graph look up its contract when it runs."""
    for nested in graph_modules(gm):
        for node in nested.graph.find_nodes(op="call_function", target=ops.unshard.default):
            node.update_arg(1, "")
        nested.recompile()
