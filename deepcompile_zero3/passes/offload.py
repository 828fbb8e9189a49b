"""Keeps what a forward saves for backward in another place, and brings it back ahead of its use.

::

    forward    x  ->  store_start(x)  ...  last use of x  ->  store_wait  ->  saved in place of x
    backward   load_start(stored)  ...  load_wait  ->  first use of x

The place is a file, or host memory beside a GPU. The copies run beside the computation.
``store_wait`` reads x too, so that its memory is not reused while it is copied. It stands behind
the last use of x, where what is saved so far would exceed what may stay: no sooner than some starts
later, since nothing is to wait for a copy that has just begun. Likewise, ``load_start`` stands
where what the backward has used up by then leaves room, or some waits ahead of its own. Both take
tokens and handles ahead of them as ``after``: a compiler may move them, but not ahead of those.
"""

import operator
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import fx

from deepcompile_zero3.graph.alias import base_of, views_of
from deepcompile_zero3.graph.size import hinted_nbytes_of
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops
from deepcompile_zero3.torch_internals import OpOverload, compiler, is_wrapper

_SMALL = 256 << 10  # bytes; smaller tensors stay, since a copy has a cost of its own
_STORES_AHEAD = 2  # stores that start before one is waited for
_LOADED_AHEAD = 64 << 20  # bytes of loads that start before one is waited for, if several


class Offload(NamedTuple):
    """Where saved tensors go.

    Attributes:
        most_bytes: maximum size in bytes of those that stay in memory.
        tier: number of the file, or None for page-locked host memory beside a GPU.
        device: type of the device that computes. Tensors of others stay where they are.
    """

    most_bytes: float
    tier: int | None
    device: str = "cpu"


class Saved(NamedTuple):
    """What a forward saves: sizes in bytes, by the names of nodes.

    Attributes:
        offloaded: activations that go to another place.
        resident: those that stay in memory.
    """

    offloaded: Mapping[str, int]
    resident: Mapping[str, int]


def offload_saved(gm: fx.GraphModule, saved: Collection[int], offload: Offload) -> Saved:
    """Makes a forward save copies in another place instead of tensors.

    Tensors that are computed first, which wait longest for their use, go first.

    Args:
        gm: a forward graph.
        saved: positions of the results that it saves for backward.
        offload: where they go, and how much stays.
    """
    graph, output = gm.graph, gm.graph.output_node()
    chosen, resident = _choose(output, saved, offload)
    tier = () if offload.tier is None else (offload.tier,)
    starts = []
    for node in chosen:
        with graph.inserting_after(node):
            starts.append(_call(graph, ops.store_start.default, (node, *tier), "store"))
        starts[-1].meta["val"] = _handle_of(node)
    order = {node: position for position, node in enumerate(graph.nodes)}
    sizes = {node: hinted_nbytes_of(node) for node in (*chosen, *resident)}
    awaited = _awaited_behind(order, chosen, starts, sizes, offload.most_bytes)
    last = max([*starts, *filter(_is_token, order)], key=order.__getitem__, default=output)
    waits: list[fx.Node] = []
    for node, start, after in zip_longest(chosen, starts, awaited):
        place = output.prev
        if after is not None:
            behind = [*waits[-1:], after, *(_uses(node) & order.keys())]
            place = max(behind, key=order.__getitem__)  # the first of equals: a wait
        after = after or last
        with graph.inserting_after(place):
            arguments = (start, node) if after is start else (start, node, after)
            stored = _call(graph, ops.store_wait.default, arguments, "stored")
        stored.meta["val"] = _on_host(node.meta["val"])
        order[stored] = order[place]
        waits.append(stored)
        output.replace_input_with(node, stored)
    return Saved(*({n.name: sizes[n] for n in nodes} for nodes in (chosen, resident)))


def load_saved(gm: fx.GraphModule, saved: Saved, most_bytes: float) -> None:
    """Makes a backward load the saved tensors that a forward has offloaded, ahead of their use.

    Args:
        gm: a backward graph.
        saved: what its forward saves.
        most_bytes: size in bytes up to which the saved tensors that are in memory at a time leave
            room for a load.
    """
    nodes = list(gm.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    sizes = {**saved.offloaded, **saved.resident}
    inputs = [n for n in nodes if n.op == "placeholder" and n.name in sizes and n.users]
    first = {node: min(node.users, key=order.__getitem__) for node in inputs}
    used_up: Counter[fx.Node] = Counter()  # bytes that are free behind a node
    for node in inputs:
        used_up[max(_uses(node), key=order.__getitem__, default=node)] += sizes[node.name]
    pending = [node for node in inputs if node.name in saved.offloaded]
    pending.sort(key=lambda node: order[first[node]])
    loads = _Loads(gm.graph, pending, sum(saved.resident.values()), most_bytes)
    needed_by: dict[fx.Node, list[fx.Node]] = {}
    for node in pending:
        needed_by.setdefault(first[node], []).append(node)
    begin, token = next(node for node in nodes if node.op != "placeholder"), None
    loads.start(begin.prev, None)
    for node in nodes:
        for needed in needed_by.get(node, ()):
            loads.wait(needed, node, token)
        loads.live -= used_up[node]
        if node.target in REDUCTIONS or _is_token(node):
            token = node
            loads.start(node, node)


class _Loads:
    """Starts the loads of a backward in the order of their use, and waits for them.

    Attributes:
        live: bytes of saved tensors that are in memory, or on their way there.
    """

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[fx.Node], resident: int, most_bytes: float
    ) -> None:
        self._graph = graph
        self._pending = deque(inputs)
        self._started: dict[fx.Node, fx.Node] = {}  # handles of loads on their way
        self._most_bytes = most_bytes
        self.live = resident

    def start(self, place: fx.Node, after: fx.Node | None) -> None:
        """Starts those that there is room for, behind ``place``."""
        while self._pending and self._has_room(self._pending[0]):
            node = self._pending.popleft()
            with self._graph.inserting_after(place):
                arguments = (node,) if after is None else (node, after)
                device = node.meta["val"].device.type
                place = _call(self._graph, ops.load_start.default, arguments, "load", device)
            place.meta["val"] = _handle_of(node)
            self._started[node] = place
            self.live += hinted_nbytes_of(node)

    def wait(self, node: fx.Node, before: fx.Node, token: fx.Node | None) -> None:
        """Waits for the load of ``node`` ahead of ``before``, its first use."""
        start = self._started.pop(node)
        with self._graph.inserting_before(before):
            arguments = (start, node) if token is None else (start, node, token)
            device = (value := node.meta["val"]).device.type
            wait = _call(self._graph, ops.load_wait.default, arguments, "loaded", device)
        wait.meta["val"] = torch.empty_like(value)
        node.meta["val"] = _on_host(value)
        node.replace_all_uses_with(wait, lambda user: user not in (start, wait))
        self.start(wait, wait)

    def _has_room(self, node: fx.Node) -> bool:
        nbytes = hinted_nbytes_of(node)
        on_their_way = sum(map(hinted_nbytes_of, self._started))
        return (
            on_their_way == 0
            or on_their_way + nbytes <= _LOADED_AHEAD
            or self.live + nbytes <= self._most_bytes
        )


def _awaited_behind(
    order: Iterable[fx.Node],
    chosen: Sequence[fx.Node],
    starts: Sequence[fx.Node],
    sizes: Mapping[fx.Node, int],
    most_bytes: float,
) -> list[fx.Node]:
    """Returns the nodes behind which stores are waited for, of all but those at the end.

    Each is one that exists in any case, so that the wait may take it: a start, a gather's token or
    an activation that stays.
    """
    live = started = 0
    found: list[fx.Node] = []
    for node in order:
        live += sizes.get(node, 0)
        is_start = started < len(starts) and node is starts[started]
        started += is_start
        stays = node in sizes and node not in chosen
        if not (is_start or stays or _is_token(node)):
            continue
        while live > most_bytes and len(found) + _STORES_AHEAD < started:
            live -= sizes[chosen[len(found)]]
            found.append(node)
    return found


def _choose(
    output: fx.Node, saved: Collection[int], offload: Offload
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns the activations that go and those that stay, in the order in which they are computed.

    The latter are one for each storage.
    """
    order = {node: position for position, node in enumerate(output.graph.nodes)}
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
    chosen, resident = [], []
    for base, (node, *others) in sorted(by_base.items(), key=lambda item: order[item[0]]):
        may_go = base not in returned and not others and _fits(node, offload)
        if may_go and left > offload.most_bytes:
            chosen.append(node)
            left -= hinted_nbytes_of(base)
        else:
            resident.append(node)
    return sorted(chosen, key=order.__getitem__), resident


def _is_activation(base: fx.Node) -> bool:
    """Returns whether a graph computes ``base``, and has neither got nor gathered it."""
    is_gathered = base.target is operator.getitem and base.all_input_nodes[0].target in WAITS
    return base.op != "placeholder" and not is_gathered


def _fits(node: fx.Node, offload: Offload) -> bool:
    value = node.meta["val"]
    is_there = value.device.type in (offload.device, "meta")
    if value.layout is not torch.strided or not is_there or is_wrapper(value):
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


def _call(
    graph: fx.Graph, op: OpOverload, arguments: tuple, name: str, device: str = "cpu"
) -> fx.Node:
    kwargs: dict[str, Any] = {} if device == "cpu" else {"device": device}
    return graph.create_node("call_function", op, arguments, kwargs, name=name)


def _is_token(node: fx.Node) -> bool:
    """Returns whether ``node`` is the token of a wait for a gather."""
    if node.target is not operator.getitem or node.all_input_nodes[0].target not in WAITS:
        return False
    wait, position = node.args
    return position == len(wait.args[1])  # type: ignore[union-attr, arg-type]


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, device="cpu") if value.is_cuda else torch.empty_like(value)


def _handle_of(node: fx.Node) -> torch.Tensor:
    return node.meta["val"].new_empty(1, dtype=torch.int64, device="cpu")
