"""Measures the kernels of a plan on this machine's CPU."""

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from deepcompile_zero3.graph.alias import is_view
from deepcompile_zero3.graph.text import graph_text
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.tools.planning.kernels import Kernel, aten, is_inlined, results_of
from deepcompile_zero3.torch_internals import compiler

_SECONDS = 0.02  # for each kernel, beside its compilation
_LEAST, _MOST = 3, 50  # repetitions
_CACHE_BYTES = 64 << 20  # more than a processor's caches hold


def measure_kernels(
    kernels: Iterable[Kernel], between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Compiles each kind of kernel with Inductor and times it.

    Args:
        kernels: kernels of a plan, traced on the CPU.
        between: called before each kind is timed, such as a barrier of ranks that measure at once.

    Returns:
        Mean seconds of each kind of kernel, by :func:`key_of`.
    """
    different = {key_of(kernel): kernel for kernel in kernels}
    return {key: _measure(kernel, between) for key, kernel in different.items()}


def key_of(kernel: Kernel) -> str:
    """Returns a key that is equal for kernels with the same computation and strides."""
    graph_module, examples = as_graph(kernel)
    names = {node.name: f"%{number}" for number, node in enumerate(graph_module.graph.nodes)}
    text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), graph_text(graph_module))
    strides = [tuple(e.stride()) if isinstance(e, torch.Tensor) else () for e in examples]
    return f"{text}\n{strides}"


def _measure(kernel: Kernel, between: Callable[[], None]) -> float:
    graph_module, examples = as_graph(kernel)
    run = compiler.compile_fx_inner(graph_module, examples)
    inputs = [[_filled(example) for example in examples]]
    nbytes = sum(value.nbytes for value in inputs[0] if isinstance(value, torch.Tensor))
    while len(inputs) * max(nbytes, 1 << 16) < _CACHE_BYTES:
        inputs.append([_filled(example) for example in examples])
    run(list(inputs[0]))
    between()
    spent, count = 0.0, 0
    while count < _LEAST or (spent < _SECONDS and count < _MOST):
        arguments = list(inputs[count % len(inputs)])
        start = time.perf_counter()
        run(arguments)
        spent, count = spent + time.perf_counter() - start, count + 1
    return spent / count


def as_graph(kernel: Kernel) -> tuple[fx.GraphModule, list[Any]]:
    """Returns the kernel as a graph of its own, and fake values of its inputs."""
    if kernel.nodes[0].target is ops.reduce_mm.default:
        return _product(kernel.nodes[0])
    graph = fx.Graph()
    results = results_of(kernel)
    inputs = _inputs_of([*kernel.nodes, *results], set(kernel.nodes))
    copies = {node: _input(graph, node) for node in inputs}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copy)
        return copies[node]

    for node in kernel.nodes:
        copy(node)
    graph.output(tuple(copy(node) for node in results))
    return fx.GraphModule({}, graph), [node.meta["val"] for node in inputs]


def _product(reduction: fx.Node) -> tuple[fx.GraphModule, list[Any]]:
    """Returns the matrix product of a reduction that takes the factors of a gradient."""
    graph = fx.Graph()
    factors: Any = reduction.args[0]
    left, right = (factor.meta["val"] for factor in factors)
    product = graph.call_function(aten.mm.default, tuple(_input(graph, f) for f in factors))
    product.meta["val"] = left.new_empty(left.shape[0], right.shape[1])
    graph.output((product,))
    return fx.GraphModule({}, graph), [left, right]


def _input(graph: fx.Graph, node: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(f"input_{len(graph.nodes)}")
    placeholder.meta["val"] = node.meta["val"]
    return placeholder


def _inputs_of(nodes: Iterable[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """Returns the nodes that ``nodes`` read and that are not computed inside."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node in inside or _leads_to(node, inside) or is_inlined(node):
            found |= dict.fromkeys(_inputs_of(node.all_input_nodes, inside))
        else:
            found[node] = None
    return list(found)


def _leads_to(view: fx.Node, inside: set[fx.Node]) -> bool:
    """Returns whether a node is a view of a tensor that is computed inside."""
    if not is_view(view):
        return False
    return any(source in inside or _leads_to(source, inside) for source in view.all_input_nodes)


def _filled(example: Any) -> Any:
    """Returns a tensor of the same shape and strides, filled with small numbers or index 0."""
    if not isinstance(example, torch.Tensor):
        return int(example)
    sizes, strides = [int(n) for n in example.shape], [int(n) for n in example.stride()]
    tensor = torch.empty_strided(sizes, strides, dtype=example.dtype)
    return tensor.fill_(0.5) if example.is_floating_point() else tensor.zero_()
