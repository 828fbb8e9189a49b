"""Measures this machine, and the kernels of a plan on its CPU."""

import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from deepcompile_zero3.graph.alias import is_view
from deepcompile_zero3.graph.text import graph_text
from deepcompile_zero3.runtime import _C, ops
from deepcompile_zero3.sharding.forward.all_gather import AllGather
from deepcompile_zero3.sharding.fully_shard import fully_shard
from deepcompile_zero3.sharding.module_parameters import all_parameters_of
from deepcompile_zero3.tools.planning.kernels import Kernel, aten, is_inlined, results_of
from deepcompile_zero3.tools.planning.machine import Link, Machine
from deepcompile_zero3.torch_internals import compiler
from deepcompile_zero3.transport.json_collectives import all_gather_json

_SECONDS = 0.02  # for each kernel, beside its compilation
_LEAST, _MOST = 3, 50  # repetitions
_CACHE_BYTES = 64 << 20  # more than a processor's caches hold
_SMALL, _LARGE = 1 << 20, 64 << 20  # bytes of a gather
_SIDE = 1024  # rows and columns of a matrix


# ---- the machine


def measure_machine(mesh: DeviceMesh) -> Machine:
    """Measures the machine of a mesh, on all ranks at once. Collective; takes some seconds.

    Args:
        mesh: a mesh of one dimension, on one host: ``remote`` is a copy of the measured ``local``.

    Returns:
        The machine with the numbers of the slowest rank, the same on all ranks.
    """
    return measure_links(mesh, measure_device(torch.device(mesh.device_type), "here"))


def measure_device(
    device: torch.device,
    name: str,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Machine:
    """Measures this rank alone: the links of the machine take no time.

    Args:
        device: the device of the rank.
        name: the machine's name.
        dtypes: the dtypes of the matrix products that are measured, with ``torch.float32``. Some
            processors take a minute for products in ``torch.bfloat16``.
    """
    source, target = torch.zeros(2, _LARGE, dtype=torch.uint8, device=device)
    few = torch.zeros(16, dtype=torch.float32, device=device)
    alone = Link(0.0, float("inf"))
    return Machine(
        name=name,
        flops={dtype: _flops(dtype, device) for dtype in dtypes},
        bandwidth=2 * _LARGE / _seconds(lambda: target.copy_(source), device),
        update_bandwidth=_update_bandwidth(device),
        launch=_seconds(lambda: [few.add_(1) for _ in range(100)], device) / 100,
        memory=float("inf"),
        ranks_per_host=1,
        local=alone,
        remote=alone,
        source="measured",
    )


def measure_links(mesh: DeviceMesh, mine: Machine) -> Machine:
    """Returns the machine of all ranks of a mesh; this rank has measured ``mine``. Collective."""
    device = torch.device(mesh.device_type)
    group = mesh.get_group()
    ranks = mesh.size()
    small, large = (_Gathered(nbytes, mesh) for nbytes in (_SMALL, _LARGE))
    quick, slow = _seconds(small.gather, device), _seconds(large.gather, device)
    both = _seconds(lambda: large.gather(beside=True), device)
    alone = _seconds(large.compute, device)
    received = (ranks - 1) / ranks
    # Copies at both ends of the link do not count as its time.
    copied = 2 / ranks / mine.bandwidth
    rate = max((slow - quick) / (_LARGE - _SMALL) - copied, 1e-15)
    latency = max(quick - mine.launch - _SMALL * (rate + copied), 0.0)
    costs = {
        **{str(dtype): 1 / flops for dtype, flops in mine.flops.items()},
        "copy": 1 / mine.bandwidth,
        "update": 1 / mine.update_bandwidth,
        "launch": mine.launch,
        "rate": rate,
        "latency": latency,
        "not hidden": 1 - min(max((alone + slow - both) / slow, 0.0), 1.0),
    }
    told = all_gather_json("measure_links", costs, group)
    worst = {what: max(theirs[what] for theirs in told) for what in costs}
    bandwidth = received / worst["rate"] if ranks > 1 else float("inf")
    link = Link(worst["latency"] / max(ranks - 1, 1), bandwidth)
    return replace(
        mine,
        flops={dtype: 1 / worst[str(dtype)] for dtype in mine.flops},
        bandwidth=1 / worst["copy"],
        update_bandwidth=1 / worst["update"],
        launch=worst["launch"],
        ranks_per_host=ranks,
        local=link,
        remote=link,
        overlap=1 - worst["not hidden"],
        backend=_C.backend_name(group.group_name, device),
    )


class _Gathered:
    """A parameter to gather, and matrix products that take about as long."""

    def __init__(self, nbytes: int, mesh: DeviceMesh) -> None:
        rows = mesh.size()
        columns = nbytes // 4 // rows
        device, dtype = torch.device(mesh.device_type), torch.float32
        self._module = nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)
        fully_shard(self._module, mesh=mesh, transport="c10d")
        self._parameters = all_parameters_of(self._module, "measure_machine")
        self._left = torch.full((_SIDE, _SIDE), 0.5, device=device, dtype=dtype)

    def gather(self, beside: bool = False) -> None:
        running = AllGather(self._parameters)
        if beside:
            self.compute()
        running.wait()

    def compute(self) -> None:
        for _ in range(4):
            self._left @ self._left


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Returns the median seconds of a call; the first two of twelve calls are not counted."""
    took = []
    for _ in range(12):
        start = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        took.append(time.perf_counter() - start)
    return statistics.median(took[2:])


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.full((_SIDE, _SIDE), 0.5, dtype=dtype, device=device)
    return 2 * _SIDE**3 / _seconds(lambda: matrix @ matrix, device)


def _update_bandwidth(device: torch.device) -> float:
    """Measures AdamW without an optimizer, since the user's hooks see the steps of optimizers."""
    zeros = torch.zeros(4, _LARGE // 4, dtype=torch.float32, device=device)
    parameter, gradient, first, second = ([tensor] for tensor in zeros)
    step = torch.zeros((), dtype=torch.float32, device=device)
    settings: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    settings |= {"weight_decay": 0.01, "amsgrad": False, "maximize": False}

    @torch.no_grad()
    def update() -> None:
        adamw(parameter, gradient, first, second, [], [step], fused=True, **settings)

    return 7 * _LARGE / _seconds(update, device)


# ---- kernels


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
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    reduction = kernel.nodes[0] if kernel.nodes[0].target is ops.reduce_mm.default else None
    inside = set() if reduction else set(kernel.nodes)

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node in inside or _leads_to(node, inside) or is_inlined(node):
                copies[node] = graph.node_copy(node, copy)
            else:
                with graph.inserting_before():  # the beginning
                    copies[node] = graph.placeholder(f"input_{len(copies)}")
                copies[node].meta["val"] = node.meta["val"]
        return copies[node]

    if reduction:
        factors: Any = reduction.args[0]
        product = graph.call_function(aten.mm.default, tuple(map(copy, factors)))
        left, right = (factor.meta["val"] for factor in factors)
        product.meta["val"] = left.new_empty(left.shape[0], right.shape[1])
        graph.output((product,))
    else:
        for node in kernel.nodes:
            copy(node)
        graph.output(tuple(map(copy, results_of(kernel))))
    inputs = graph.find_nodes(op="placeholder")
    return fx.GraphModule({}, graph), [node.meta["val"] for node in inputs]


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
