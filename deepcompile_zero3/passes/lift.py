"""Replaces ``unshard(placeholder)`` in Dynamo's graph by the placeholder itself.

After lifting, AOTAutograd traces the plain single-device model with the placeholder as its primal.
The partitioner saves the placeholder for backward, a graph input that costs nothing.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.graph.calls import bodies_of, inputs_of
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.torch_internals import compiler


def lift_unshards(gm: fx.GraphModule) -> bool:
    """Replaces each ``zero3.unshard`` by its placeholder, in nested graphs too.

    An ``unshard`` whose result leaves the top graph, itself or as a view, stays: a graph may not
    return the memory of a placeholder, which has none.

    Returns whether any was replaced.
    """
    escaping = _storages_of_outputs(gm.graph)
    lifted = False
    for graph in _graphs(gm):
        for node in graph.find_nodes(op="call_function", target=ops.unshard.default):
            if _storage(node) in escaping:
                continue
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            lifted = True
        graph.lint()
    _recompile(gm)
    return lifted


def forget_contracts(gm: fx.GraphModule) -> None:
    """Makes each ``zero3.unshard`` of a graph use the contract that there is when it runs."""
    for graph in _graphs(gm):
        for node in graph.find_nodes(op="call_function", target=ops.unshard.default):
            node.update_arg(1, "")
    _recompile(gm)


def uses_of(graph: fx.Graph) -> dict[fx.Node, tuple[tuple[int, ...], bool]]:
    """Returns where a lifted graph uses each of its inputs, and whether only to look up rows."""
    lookups = (torch.nn.functional.embedding, torch.embedding, torch.ops.aten.embedding.default)
    positions = {node: position for position, node in enumerate(graph.nodes)}
    uses = {}
    for node in graph.find_nodes(op="placeholder"):
        users = [user for user in node.users if user.op != "output"]
        uses[node] = (
            tuple(sorted(positions[user] for user in users)) or (len(positions),),
            bool(users) and all(user.target in lookups for user in users),
        )
    return uses


def name_placeholders(
    inputs: Mapping[fx.Node, ParameterFacts], prefix: int, suffix: str = ""
) -> None:
    """Renames a graph's inputs after their parameters, without the first ``prefix`` characters."""
    for node, facts in inputs.items():
        compiler.rename(node, facts.fqn[prefix:].replace(".", "_") + suffix)


def declare_grad_dtypes(gm: fx.GraphModule, inputs: Mapping[int, ParameterFacts]) -> None:
    """Declares the leaf's dtype on each input (by position) that has a contract of its own.

    What a module reads in place of the input has the same contract: its uses are summed first.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    for position, facts in inputs.items():
        if not facts.declares_grad_dtype:
            continue
        places = {placeholders[position]: placeholders[-1]}
        if not facts.is_read_as_gathered:
            places |= {read: read for read in _reads(gm, placeholders[position])}
        for node, place in places.items():
            with node.graph.inserting_after(place):
                node.graph.call_function(grad_dtype.declare, (node, facts.grad_dtype))
    gm.graph.lint()
    _recompile(gm)


def _reads(gm: fx.GraphModule, placeholder: fx.Node) -> Iterator[fx.Node]:
    """Yields what modules read in place of an input of ``gm``, inside of checkpoints too."""
    for user in list(placeholder.users):
        match user.target:
            case compiler.autograd_function_apply:  # that of a scalar
                yield from user.users
            case compiler.tag_activation_checkpoint:
                for body in bodies_of(gm, user):
                    for read in inputs_of(body, user, placeholder):
                        yield from _reads(body, read)
            case torch_internals.HigherOrderOperator():
                continue  # autograd sees only what it returns
            case _:
                yield user


def _recompile(gm: fx.GraphModule) -> None:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()


def _graphs(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module.graph


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return torch_internals.storage_address(value) if isinstance(value, torch.Tensor) else None


def _storages_of_outputs(graph: fx.Graph) -> set[int | None]:
    return {_storage(node) for node in graph.output_node().all_input_nodes} - {None}
