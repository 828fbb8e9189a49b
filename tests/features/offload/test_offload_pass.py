"""When the pass that offloads activations stores and loads them."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from deepcompile_zero3.features.offload.activations import Offload, load_saved, offload_saved
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.sharding.budget import LOADED_AHEAD

MIB = 2**20
SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=12)  # MiB
MOST = st.integers(0, 256)


def _forward(sizes):
    """Returns a graph that computes a tensor of each size, and saves all of them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = []
    for i, size in enumerate(sizes):
        nodes.append(graph.create_node("call_function", torch.ops.aten.relu.default, (x,)))
        nodes[-1].name = f"a{i}"
        nodes[-1].meta["val"] = torch.empty(size * MIB, dtype=torch.uint8, device="meta")
    graph.output((*nodes,))
    return fx.GraphModule(torch.nn.Module(), graph)


def _backward(sizes):
    """Returns a graph that reads those tensors, the last first, and reduces what it computes."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"a{i}") for i in range(len(sizes))]
    for node, size in zip(inputs, sizes, strict=True):
        node.meta["val"] = torch.empty(size * MIB, dtype=torch.uint8, device="meta")
    for node in reversed(inputs):
        gradient = graph.call_function(torch.ops.aten.neg.default, (node,))
        graph.call_function(ops.reduce_grad.default, (gradient, gradient))
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


def _nbytes(node):
    return node.meta["val"].nbytes


def _offloaded(gm, most):
    """Runs the pass over a forward, whose results are all saved, with ``most`` MiB to stay."""
    names = {i: node.name for i, node in enumerate(gm.graph.output_node().args[0])}
    saved = offload_saved(gm, names, Offload(most * MIB, LOADED_AHEAD, None))
    gm.graph.lint()
    return saved


def _waits(gm):
    return gm.graph.find_nodes(op="call_function", target=ops.store_wait.default)


@given(sizes=SIZES, most=MOST)
def test_a_forward_waits_for_stores_where_it_has_to(sizes, most):
    gm = _forward(sizes)
    saved = _offloaded(gm, most)
    # The first go, and as few as possible.
    first = len(saved.offloaded)
    assert saved.offloaded == {f"a{i}" for i in range(first)}
    assert saved.resident == tuple(
        (n * MIB, (f"a{first + i}",)) for i, n in enumerate(sizes[first:])
    )
    assert sum(sizes[first:]) <= most
    assert not first or sum(sizes[first - 1 :]) > most
    live, started, awaited = 0, [], 0
    activations = {f"a{i}" for i in range(len(sizes))}
    for node in gm.graph.nodes:
        if node.target is ops.store_start.default:
            started.append(node.args[0])
        if node.target is ops.store_wait.default:
            assert node.args[1] is started[awaited]
            is_at_end = len(started) == first
            assert is_at_end or (live > most * MIB and len(started) - awaited > 2)
            live -= _nbytes(node.args[1])
            awaited += 1
        if node.name in activations:  # waits were where they had to be
            assert live <= most * MIB or len(started) - awaited <= 2
            live += _nbytes(node)
    assert awaited == first
    assert live == sum(sizes[first:]) * MIB


def test_what_is_read_late_holds_no_other_store():
    gm = _forward([32] * 8)
    first, *_, last = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    with gm.graph.inserting_after(last):
        gm.graph.call_function(torch.ops.aten.neg.default, (first,))
    _offloaded(gm, 0)
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    of_first, *others = sorted(_waits(gm), key=lambda wait: wait.args[1].name)
    assert order[of_first] > order[last]
    assert all(order[wait] < order[last] for wait in others[:-3])


def test_a_view_of_an_early_tensor_may_come_late():
    gm = _forward([32] * 8)
    output, nodes = gm.graph.output_node(), gm.graph.output_node().args[0]
    with gm.graph.inserting_after(nodes[1]):
        view = gm.graph.call_function(torch.ops.aten.view.default, (nodes[0], [-1]))
    view.meta["val"] = nodes[0].meta["val"]
    output.args = ((view, *nodes[1:]),)
    _offloaded(gm, 0)
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    assert sum(order[wait] < order[nodes[-1]] for wait in _waits(gm)) == 5


@given(sizes=SIZES, most=MOST)
def test_a_backward_loads_ahead_where_there_is_room(sizes, most):
    saved = _offloaded(_forward(sizes), most)
    resident = {name for each in saved.resident for name in each.names}
    gm = _backward(sizes)
    load_saved(gm, saved, Offload(most * MIB, LOADED_AHEAD, None))
    gm.graph.lint()
    live, on_their_way, started, loaded = sum(e.nbytes for e in saved.resident), 0, [], {}
    expected = [f"a{i}" for i in reversed(range(len(sizes))) if f"a{i}" in saved.offloaded]

    def has_room(nbytes):
        return on_their_way == 0 or on_their_way + nbytes <= 64 * MIB or live + nbytes <= most * MIB

    for node in gm.graph.nodes:
        if node.target is ops.load_start.default:
            nbytes = _nbytes(node.args[0])
            assert has_room(nbytes)
            on_their_way += nbytes
            live += nbytes
            started.append(node.args[0].name)
        if node.target is ops.load_wait.default:
            on_their_way -= _nbytes(node.args[1])
            loaded[node] = node.args[1].name
        if node.target is torch.ops.aten.neg.default:
            assert node.args[0].name in resident or node.args[0] in loaded
            left = expected[len(started) :]
            assert not left or not has_room(sizes[int(left[0][1:])] * MIB)
            live -= _nbytes(node.args[0])
    assert started == expected == [*loaded.values()]
    assert live == on_their_way == 0


def test_tensors_that_share_memory_stay_until_all_are_used():
    gm = _forward([64, 64, 64])
    output, (a0, a1, a2) = gm.graph.output_node(), gm.graph.output_node().args[0]
    with gm.graph.inserting_before(output):
        view = gm.graph.call_function(torch.ops.aten.view.default, (a1, [64 * MIB]))
    view.meta["val"] = a1.meta["val"]
    output.args = ((a0, a1, view, a2),)
    names = {0: "a0", 1: "a1", 2: "shared", 3: "a2"}
    saved = offload_saved(gm, names, Offload(0, LOADED_AHEAD, None))
    assert saved == (frozenset({"a0", "a2"}), ((64 * MIB, ("a1", "shared")),))
    saved = offload_saved(_forward([64]), {}, Offload(0, LOADED_AHEAD, None))
    assert saved == (frozenset(), ())
