"""Stores what a forward saves for backward in another place, and loads it ahead of its use.

::

    forward    x  ->  store_start(x)  ...  last use of x  ->  store_wait  ->  saved in place of x
    backward   load_start(stored)  ...  load_wait  ->  first use of x

The place is a file, or host memory beside a GPU. The copies run beside the computation.
``store_wait`` reads x too, so that its memory is not reused while it is copied. It follows the last
use of x, as late as the memory limit allows, and normally after two later stores have started:
nothing waits for a copy that has just begun. Likewise, ``load_start`` stands where the backward has
freed enough memory for the load, or at least some waits before its own. Both take an earlier token
or handle as ``after``: a compiler may move them, but not ahead of that.
"""

import math
import operator
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx

from deepcompile_zero3.graph.alias import base_of, views_of
from deepcompile_zero3.graph.size import hinted_nbytes_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.gather import clone_returned_views, insert_gathers
from deepcompile_zero3.passes.graph_pass import GraphFacts, GraphPass, own_pass
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops
from deepcompile_zero3.sharding.budget import LOADED_AHEAD
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.torch_internals import OpOverload, compiler, is_wrapper

_SMALL = 256 << 10  # bytes; smaller tensors stay, since a copy has a cost of its own
_STORES_AHEAD = 2  # stores that start before one is waited for


class Offload(NamedTuple):
    """Where saved tensors go.

    Attributes:
        max_bytes: maximum size in bytes of those that stay in memory.
        loaded_ahead: bytes of loads that start before one is waited for, if several.
        tier: number of the file, or None for page-locked host memory beside a GPU.
        device: type of the device that computes. Tensors of others stay where they are.
    """

    max_bytes: float
    loaded_ahead: int
    tier: int | None
    device: str = "cpu"


class Resident(NamedTuple):
    """A storage that a forward saves and leaves in memory.

    Attributes:
        nbytes: its size in bytes.
        names: the inputs of the backward that share it. Empty if the forward also returns it: then
            the backward does not free it.
    """

    nbytes: int
    names: tuple[str, ...]


class SavedActivations(NamedTuple):
    """The activations that a forward saves.

    Attributes:
        offloaded: the inputs of its backward that are in another place, by name.
        resident: those that stay in memory.
    """

    offloaded: frozenset[str]
    resident: tuple[Resident, ...]


def offload_saved(
    gm: fx.GraphModule, saved: Mapping[int, str], offload: Offload
) -> SavedActivations:
    """Makes a forward save copies in another place instead of tensors.

    Tensors that are computed first, which wait longest for their use, go first.

    Args:
        gm: a forward graph.
        saved: names of the inputs of its backward, by the positions of the results that it saves.
        offload: where they go, and how much stays.
    """
    graph, output = gm.graph, gm.graph.output_node()
    activations = _activations(output, saved, offload)
    tier = () if offload.tier is None else (offload.tier,)
    stores = {}
    for node in (each.node for each in activations if each.goes):
        with graph.inserting_after(node):
            stores[node] = _call(graph, ops.store_start.default, (node, *tier), "store")
        stores[node].meta["val"] = _handle_of(node)
    order = {node: position for position, node in enumerate(graph.nodes)}
    ends = {node: max(_uses(node), key=order.__getitem__) for node in stores}
    stay = (each.node for each in activations if not each.goes)
    tokens = {*stores.values(), *filter(_is_plain, stay), *filter(_is_token, order)}
    places = _places_of_waits(order, activations, stores, ends, tokens, offload.max_bytes)
    last = max(tokens, key=order.__getitem__, default=output)
    waits: dict[fx.Node, fx.Node] = {}  # the last one behind each node
    for node in sorted(stores, key=order.__getitem__):
        token, start = places.get(node), stores[node]
        place = max(token, ends[node], key=order.__getitem__) if token else output.prev
        after = token or last
        with graph.inserting_after(waits.get(place, place)):
            arguments = (start, node) if after is start else (start, node, after)
            stored = _call(graph, ops.store_wait.default, arguments, "stored")
        stored.meta["val"] = _on_host(node.meta["val"])
        waits[place] = stored
        output.replace_input_with(node, stored)
    offloaded = (name for each in activations if each.goes for name in each.names)
    resident = (Resident(each.nbytes, each.names) for each in activations if not each.goes)
    return SavedActivations(frozenset(offloaded), tuple(resident))


def load_saved(gm: fx.GraphModule, saved: SavedActivations, offload: Offload) -> None:
    """Makes a backward load the saved tensors that a forward has offloaded, ahead of their use.

    Args:
        gm: a backward graph.
        saved: what its forward saves.
        offload: where they are. There is room for a load where the saved tensors that are in memory
            are smaller than may stay.
    """
    nodes = list(gm.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    inputs = {node.name: node for node in nodes if node.op == "placeholder" and node.users}
    free: Counter[fx.Node] = Counter()  # bytes that are used up behind a node
    for nbytes, names in saved.resident:
        shares = [inputs[name] for name in names if name in inputs]
        if uses := set().union(*map(_uses, shares)):
            free[max(uses, key=order.__getitem__)] += nbytes
    needed: dict[fx.Node, list[fx.Node]] = {}  # what is to be loaded, by its first use
    for node in (node for name, node in inputs.items() if name in saved.offloaded):
        needed.setdefault(min(node.users, key=order.__getitem__), []).append(node)
        if uses := _uses(node):
            free[max(uses, key=order.__getitem__)] += hinted_nbytes_of(node)
    pending = [node for use in sorted(needed, key=order.__getitem__) for node in needed[use]]
    resident = sum(each.nbytes for each in saved.resident)
    loads = _Loads(gm.graph, pending, resident, offload)
    begin, token = gm.graph.find_nodes(op="placeholder")[-1].next, None
    loads.start(begin.prev, None)
    for node in nodes:
        for each in needed.get(node, ()):
            loads.wait(each, node, token)
        loads.live -= free[node]
        if node.target in REDUCTIONS or _is_token(node):
            token = node
            loads.start(node, node)


def passes(
    parameters: Sequence[ShardedParameter], share: float, options: Options
) -> list[GraphPass]:
    """Returns the passes over the graphs of ``parameters``."""
    offload = _offload(parameters, share, options)

    def store(gm: fx.GraphModule, facts: GraphFacts) -> SavedActivations | None:
        return None if offload is None else offload_saved(gm, facts.saved_names, offload)

    def load(gm: fx.GraphModule, facts: GraphFacts) -> None:
        if offload is not None:
            saved = facts.from_forward.get(
                offload_saved.__name__, SavedActivations(frozenset(), ())
            )
            load_saved(gm, saved, offload)

    return [
        own_pass(
            offload_saved,
            store,
            graphs=("forward",),
            after=clone_returned_views,
            uuid=offload or (),
        ),
        own_pass(
            load_saved,
            load,
            graphs=("backward",),
            after=insert_gathers,
            changes=("gradients",),  # what a gradient is a product of may be loaded
            uuid=offload or (),
        ),
    ]


def _offload(
    parameters: Sequence[ShardedParameter], share: float, options: Options
) -> Offload | None:
    """Returns where a graph's saved tensors go, if the models have a budget of memory."""
    if options.activations_mb < math.inf and parameters:
        max_bytes = options.activations_mb * 2**20 * share
        return Offload(max_bytes, LOADED_AHEAD, None, parameters[0].placeholder.device.type)
    budget = next((each.budget for each in parameters if each.budget), None)
    if budget is None:
        return None
    return Offload(int(budget.activation_bytes * share), budget.loaded_ahead, budget.tier.number)


class _Loads:
    """Starts the loads of a backward in the order of their use, and waits for them.

    Attributes:
        live: bytes of saved tensors that are in memory, or on their way there.
    """

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[fx.Node], resident: int, offload: Offload
    ) -> None:
        self._graph = graph
        self._pending = deque(inputs)
        self._started: dict[fx.Node, fx.Node] = {}  # handles of loads on their way
        self._offload = offload
        self.live = resident

    def start(self, place: fx.Node, after: fx.Node | None) -> None:
        """Starts loads behind ``place``, as long as there is room."""
        while self._pending and self._has_room(self._pending[0]):
            node = self._pending.popleft()
            with self._graph.inserting_after(place):
                arguments = (node,) if after is None else (node, after)
                place = _call(
                    self._graph, ops.load_start.default, arguments, "load", **_to_device(node)
                )
            place.meta["val"] = _handle_of(node)
            self._started[node] = place
            self.live += hinted_nbytes_of(node)

    def wait(self, node: fx.Node, before: fx.Node, token: fx.Node | None) -> None:
        """Waits for the load of ``node`` ahead of ``before``, its first use."""
        start = self._started.pop(node)
        with self._graph.inserting_before(before):
            arguments = (start, node) if token is None else (start, node, token)
            wait = _call(
                self._graph, ops.load_wait.default, arguments, "loaded", **_to_device(node)
            )
        wait.meta["val"] = torch.empty_like(node.meta["val"])
        node.meta["val"] = _on_host(node.meta["val"])
        node.replace_all_uses_with(wait, lambda user: user not in (start, wait))
        self.start(wait, wait)

    def _has_room(self, node: fx.Node) -> bool:
        nbytes = hinted_nbytes_of(node)
        on_their_way = sum(map(hinted_nbytes_of, self._started))
        return (
            on_their_way == 0
            or on_their_way + nbytes <= self._offload.loaded_ahead
            or self.live + nbytes <= self._offload.max_bytes
        )


class _Activation(NamedTuple):
    """A storage that a forward computes and saves.

    Attributes:
        base: the node that owns it.
        node: the saved node, or the first of several that share it.
        nbytes: its size.
        names: the inputs of the backward that share it; none if the forward also returns it.
        goes: whether it goes to another place.
    """

    base: fx.Node
    node: fx.Node
    nbytes: int
    names: tuple[str, ...]
    goes: bool


def _activations(output: fx.Node, saved: Mapping[int, str], offload: Offload) -> list[_Activation]:
    """Returns the activations in the order in which they are computed."""
    order = {node: position for position, node in enumerate(output.graph.nodes)}
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    others = (result for position, result in enumerate(results) if position not in saved)
    returned = {base_of(result) for result in others if isinstance(result, fx.Node)}
    names: dict[fx.Node, dict[fx.Node, list[str]]] = {}  # by base and saved node
    for position, name in saved.items():
        node = results[position]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if _is_activation(base := base_of(node)):
            names.setdefault(base, {}).setdefault(node, []).append(name)
    left = sum(map(hinted_nbytes_of, names))
    found = []
    for base in sorted(names, key=order.__getitem__):
        nodes, nbytes = sorted(names[base], key=order.__getitem__), hinted_nbytes_of(base)
        is_returned = base in returned
        goes = len(nodes) == 1 and not is_returned and left > offload.max_bytes
        goes = goes and _fits(nodes[0], offload)
        left -= nbytes * goes
        shared = () if is_returned else tuple(chain(*names[base].values()))
        found.append(_Activation(base, nodes[0], nbytes, shared, goes))
    return found


def _places_of_waits(
    nodes: Iterable[fx.Node],
    activations: Iterable[_Activation],
    stores: Mapping[fx.Node, fx.Node],
    ends: Mapping[fx.Node, fx.Node],
    tokens: Collection[fx.Node],
    max_bytes: float,
) -> dict[fx.Node, fx.Node]:
    """Returns the tokens behind which stores are waited for, of all but those at the end.

    Args:
        nodes: those of the graph, in order.
        activations: what is saved.
        stores: the starts of stores, by what they store.
        ends: the last uses of what is stored.
        tokens: nodes that exist in any case, so that a wait may take one: starts, tokens of
            gathers, and activations that stay.
        max_bytes: size in bytes up to which nothing is waited for.
    """
    sizes = {each.node: each.nbytes for each in activations}
    # How live bytes change at each node.
    change = Counter({each.base: each.nbytes for each in activations})
    stored = {start: node for node, start in stores.items()}
    live = 0
    started: deque[fx.Node] = deque()  # those that are not waited for
    found: dict[fx.Node, fx.Node] = {}
    passed = set()
    for place in nodes:
        passed.add(place)
        live += change[place]
        if place in stored:
            started.append(stored[place])
        while place in tokens and live > max_bytes and len(started) > _STORES_AHEAD:
            node = started.popleft()
            if ends[node] in passed:
                live -= sizes[node]
            else:
                change[ends[node]] -= sizes[node]
            found[node] = place
    return found


def _is_activation(base: fx.Node) -> bool:
    """Returns whether a graph computes ``base``, and has neither got nor gathered it."""
    is_gathered = base.target is operator.getitem and base.all_input_nodes[0].target in WAITS
    return base.op != "placeholder" and not is_gathered


def _is_plain(node: fx.Node) -> bool:
    value = node.meta["val"]
    return value.layout is torch.strided and not is_wrapper(value)


def _fits(node: fx.Node, offload: Offload) -> bool:
    value = node.meta["val"]
    if not _is_plain(node) or value.device.type not in (offload.device, "meta"):
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


def _call(graph: fx.Graph, op: OpOverload, arguments: tuple, name: str, **kwargs: str) -> fx.Node:
    return graph.create_node("call_function", op, arguments, {**kwargs}, name=name)


def _to_device(node: fx.Node) -> dict[str, str]:
    """Returns the keyword argument for the device that a saved tensor is loaded to."""
    device = node.meta["val"].device.type
    return {} if device == "cpu" else {"device": device}


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
