"""Keeps what a forward saves for backward in a file, and brings it back ahead of its use.

::

    forward    x  ->  store_start(x)  ...  last use of x  ->  store_wait  ->  saved in place of x
    backward   load_start(stored)  ...  load_wait  ->  first use of x

The copies run on other threads. ``store_wait`` reads x too, so that its memory is not reused while
it is copied. It stands behind the last use of x, and some starts later: nothing waits for a copy
that has just begun. A compiler may move it, but not ahead of the last of those starts. Likewise,
``load_start`` stands some waits ahead of its own, and ``load_wait`` takes the latest token ahead of
it, so that no scheduler loads everything at once.
"""

import operator
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import fx

from deepcompile_zero3.graph.alias import base_of, views_of
from deepcompile_zero3.graph.size import hinted_nbytes_of
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops
from deepcompile_zero3.torch_internals import OpOverload, compiler, is_wrapper

_SMALL = 256 << 10  # bytes; smaller tensors stay, since a copy has a cost of its own
_STORES_AHEAD = 2  # stores that start before one is waited for
_LOADED_AHEAD = 64 << 20  # maximum bytes of loads that start before one is waited for, if several


class Offload(NamedTuple):
    """Where saved tensors go.

    Attributes:
        most_bytes: maximum size in bytes of those that stay in memory.
        tier: number of the file.
    """

    most_bytes: int
    tier: int


def offload_saved(
    gm: fx.GraphModule, saved: Collection[int], most_bytes: int, tier: int
) -> dict[str, int]:
    """Makes a forward save copies in a file in place of tensors.

    Args:
        gm: a forward graph.
        saved: positions of the results that it saves for backward.
        most_bytes: maximum size in bytes of the saved tensors that stay in memory. Those that are
            computed first, which wait longest for their use, go first.
        tier: number of the file.

    Returns:
        The sizes in bytes of the tensors that are offloaded, by the names of their nodes.
    """
    graph, output = gm.graph, gm.graph.output_node()
    order = {node: position for position, node in enumerate(graph.nodes)}
    nodes = _choose(output, saved, most_bytes, order)
    starts = []
    for node in nodes:
        with graph.inserting_after(node):
            starts.append(_call(graph, ops.store_start.default, (node, tier), "store"))
        starts[-1].meta["val"] = _handle_of(node)
    for number, (node, start) in enumerate(zip(nodes, starts, strict=True)):
        place, after = output.prev, starts[-1]
        if (later := number + _STORES_AHEAD) < len(nodes):
            after = starts[later]
            place = max([nodes[later], *(_uses(node) & order.keys())], key=order.__getitem__)
            place = after if place is nodes[later] else place
        with graph.inserting_after(place):
            arguments = (start, node) if after is start else (start, node, after)
            stored = _call(graph, ops.store_wait.default, arguments, "stored")
        stored.meta["val"] = torch.empty_like(node.meta["val"])
        output.replace_input_with(node, stored)
    return {node.name: hinted_nbytes_of(node) for node in nodes}


def load_saved(gm: fx.GraphModule, names: Collection[str]) -> None:
    """Makes a backward load the saved tensors ``names`` from a file, ahead of their use."""
    graph = gm.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    inputs = [n for n in graph.find_nodes(op="placeholder") if n.name in names and n.users]
    uses = {node: min(node.users, key=order.__getitem__) for node in inputs}
    inputs.sort(key=lambda node: order[uses[node]])
    first = next(node for node in graph.nodes if node.op != "placeholder")
    tokens = [node for node in graph.nodes if node.target in REDUCTIONS or _is_token(node)]
    waits: list[fx.Node] = []
    for number, node in enumerate(inputs):
        use = uses[node]
        behind = number - 1  # the wait that its start follows
        nbytes = hinted_nbytes_of(node)
        while behind >= 0 and nbytes + hinted_nbytes_of(inputs[behind]) <= _LOADED_AHEAD:
            nbytes += hinted_nbytes_of(inputs[behind])
            behind -= 1
        after = () if behind < 0 else (waits[behind],)
        place = waits[behind].next if after else first
        with graph.inserting_before(place):
            start = _call(graph, ops.load_start.default, (node, *after), "load")
        start.meta["val"] = _handle_of(node)
        token = [each for each in tokens if order[each] < order[use]][-1:]
        with graph.inserting_before(use):
            wait = _call(graph, ops.load_wait.default, (start, node, *token), "loaded")
        wait.meta["val"] = torch.empty_like(node.meta["val"])
        waits.append(wait)
        node.replace_all_uses_with(wait, lambda user, own=(start, wait): user not in own)


def _choose(
    output: fx.Node, saved: Collection[int], most_bytes: int, order: dict[fx.Node, int]
) -> list[fx.Node]:
    """Returns the saved tensors that go, in the order in which they are computed."""
    results: list[fx.Node | None] = list(output.args[0])  # type: ignore[arg-type]
    returned = {base_of(r) for i, r in enumerate(results) if r is not None and i not in saved}
    by_base: dict[fx.Node, set[fx.Node]] = {}
    for position in saved:
        node = results[position]
        if node is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if _is_activation(base := base_of(node)):
            by_base.setdefault(base, set()).add(node)
    left = sum(hinted_nbytes_of(base) for base in by_base)
    chosen = []
    for base, (node, *others) in sorted(by_base.items(), key=lambda item: order[item[0]]):
        if left <= most_bytes:
            break
        if base not in returned and not others and _fits(node):
            chosen.append(node)
            left -= hinted_nbytes_of(base)
    return sorted(chosen, key=order.__getitem__)


def _is_activation(base: fx.Node) -> bool:
    """Returns whether a graph computes ``base``, and has neither got nor gathered it."""
    is_gathered = base.target is operator.getitem and base.all_input_nodes[0].target in WAITS
    return base.op != "placeholder" and not is_gathered


def _fits(node: fx.Node) -> bool:
    value = node.meta["val"]
    if (
        value.layout is not torch.strided
        or value.device.type not in ("cpu", "meta")
        or is_wrapper(value)
    ):
        return False
    return hinted_nbytes_of(node) >= _SMALL and _is_dense(value)


def _is_dense(value: torch.Tensor) -> bool:
    """Returns whether the elements fill the memory from the first to the last of them."""
    expected = 1
    strides, sizes = (
        [compiler.hint_of(n) or 0 for n in ns] for ns in (value.stride(), value.shape)
    )
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _uses(node: fx.Node) -> set[fx.Node]:
    """Returns the nodes that read the memory of ``node`` in the graph."""
    base = base_of(node)
    readers = {user for each in (base, *views_of(base)) for user in each.users}
    return {user for user in readers if user.op != "output"}


def _call(graph: fx.Graph, op: OpOverload, arguments: tuple, name: str) -> fx.Node:
    return graph.create_node("call_function", op, arguments, name=name)


def _is_token(node: fx.Node) -> bool:
    """Returns whether ``node`` is the token of a wait for a gather."""
    if node.target is not operator.getitem or node.all_input_nodes[0].target not in WAITS:
        return False
    wait, position = node.args
    return position == len(wait.args[1])  # type: ignore[union-attr, arg-type]


def _handle_of(node: fx.Node) -> torch.Tensor:
    return node.meta["val"].new_empty(1, dtype=torch.int64, device="cpu")
