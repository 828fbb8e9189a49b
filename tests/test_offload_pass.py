"""When the pass that offloads activations stores and loads them."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from deepcompile_zero3.passes.offload import Offload, load_saved, offload_saved
from deepcompile_zero3.runtime import ops

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


@given(sizes=SIZES, most=MOST)
def test_a_forward_waits_for_stores_where_it_has_to(sizes, most):
    gm = _forward(sizes)
    saved = offload_saved(gm, range(len(sizes)), Offload(most * MIB, None))
    gm.graph.lint()
    assert {**saved.offloaded, **saved.resident} == {f"a{i}": n * MIB for i, n in enumerate(sizes)}
    # The first go, and as few as possible.
    assert [*saved.offloaded] == [f"a{i}" for i in range(len(saved.offloaded))]
    resident = sum(saved.resident.values())
    assert resident <= most * MIB
    if saved.offloaded:
        assert resident + [*saved.offloaded.values()][-1] > most * MIB
    live, started, awaited = 0, [], 0
    for node in gm.graph.nodes:
        if node.name in saved.offloaded or node.name in saved.resident:
            live += _nbytes(node)
        if node.target is ops.store_start.default:
            started.append(node.args[0])
        if node.target is ops.store_wait.default:
            assert node.args[1] is started[awaited]
            is_at_end = len(started) == len(saved.offloaded)
            assert is_at_end or (live > most * MIB and len(started) - awaited > 2)
            live -= _nbytes(node.args[1])
            awaited += 1
        if node.name in {**saved.offloaded, **saved.resident}:  # waits were where they had to be
            assert live - _nbytes(node) <= most * MIB or len(started) - awaited <= 2
    assert awaited == len(saved.offloaded)
    assert live == resident


@given(sizes=SIZES, most=MOST)
def test_a_backward_loads_ahead_where_there_is_room(sizes, most):
    saved = offload_saved(_forward(sizes), range(len(sizes)), Offload(most * MIB, None))
    gm = _backward(sizes)
    load_saved(gm, saved, most * MIB)
    gm.graph.lint()
    live, on_their_way, started, loaded = sum(saved.resident.values()), 0, [], {}
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
            assert node.args[0].name in saved.resident or node.args[0] in loaded
            left = expected[len(started) :]
            assert not left or not has_room(saved.offloaded[left[0]])
            live -= _nbytes(node.args[0])
    assert started == expected == [*loaded.values()]
    assert live == on_their_way == 0
