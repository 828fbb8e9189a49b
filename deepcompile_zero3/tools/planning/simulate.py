"""Simulates a step of rewritten graphs in the time that a machine would take.

The runtime itself runs, on the meta device and with channels that send nothing. The code that
trains therefore decides which parameters are gathered together, where gradients go and when a
bucket is sent.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.graph.capture import CapturedGraph, CapturedGraphs
from deepcompile_zero3.graph.metadata import COMMENT, KEPT_OF
from deepcompile_zero3.graph.peak import gathered_items
from deepcompile_zero3.graph.size import nbytes_of
from deepcompile_zero3.passes.facts import fqns_of
from deepcompile_zero3.passes.pipeline import saved_outputs
from deepcompile_zero3.passes.reduce import GradientDtypes
from deepcompile_zero3.runtime import _C, WAITS, ops
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.tools.planning.kernels import (
    Kernel,
    is_collective,
    is_inlined,
    items_of,
    memory_of,
    product_of,
    results_of,
)
from deepcompile_zero3.tools.planning.machine import Machine, Ranks
from deepcompile_zero3.tools.timeline import Span, Timeline

KINDS = ("shards", "optimizer", "gradients", "gathered", "activations", "communication")


SecondsOf: TypeAlias = Callable[[Kernel], float | None]


@dataclass(frozen=True)
class Traffic:
    """Collectives of a kind in a step of a rank.

    Attributes:
        number: the number of collectives.
        nbytes: bytes of the full buffers.
        local, remote: bytes that a rank receives over each link.
        seconds: seconds that the collectives take.
    """

    number: int = 0
    nbytes: int = 0
    local: float = 0.0
    remote: float = 0.0
    seconds: float = 0.0


@dataclass
class Step:
    """The result of a simulated step.

    Attributes:
        timeline: the timeline of the step.
        flops: FLOPs of matrix products.
        product_seconds: seconds that the products take at least, at the machine's FLOP/s for their
            dtypes.
        traffic: traffic by kind of collective.
    """

    timeline: Timeline
    flops: float
    product_seconds: float
    traffic: dict[str, Traffic]


def simulate(
    graphs: CapturedGraphs,
    parameters: Mapping[str, ShardedParameter],
    machine: Machine,
    *,
    optimizer_bytes: int = 8,
    prefetch: bool = True,
    seconds_of: SecondsOf = lambda kernel: None,
) -> Step:
    """Simulates a step: the forwards, their backwards and the optimizer.

    Args:
        graphs: rewritten graphs. Each runs once; backwards run in the reverse order of forwards.
        parameters: the graphs' parameters by FQN; they are not changed.
        machine: the machine that the step runs on.
        optimizer_bytes: bytes of the optimizer's state for each element of a shard.
        prefetch: whether gathers start early. If False, a gather starts when it is waited for.
        seconds_of: returns the measured seconds of a kernel, or None.
    """
    trained = {name for name, p in parameters.items() if p.placeholder.requires_grad}
    backwards = sorted(graphs.backward, key=lambda graph: graph.number, reverse=True)
    with _twins(parameters, machine.backend) as twins:
        simulation = _Simulation(twins, trained, machine, optimizer_bytes, prefetch, seconds_of)
        return simulation.run(graphs.forward, backwards)


@contextlib.contextmanager
def _twins(
    parameters: Mapping[str, ShardedParameter], backend: str
) -> Iterator[dict[str, _C.Parameter]]:
    """Yields, by name, handles like those of ``parameters``. They belong to a model of their own on
    the meta device. Ranks exchange messages, with the buffers that a backend of c10d needs. If a
    parameter's transport does not bound buckets, buckets are not bounded here either.
    """
    root = max(_C.live_roots(), default=0) + 1
    twins = {}
    try:
        for name, parameter in parameters.items():
            handle = parameter.handle
            twin = _C.Parameter(
                sizes=handle.sizes,
                strides=handle.strides,
                compute_dtype=handle.compute_dtype,
                device=torch.device("meta"),
                rank=handle.rank,
                world_size=handle.world_size,
                replicas=handle.replicas and _like(handle.replicas, backend),
            )
            shards = _C.SimulatedChannel(
                parameter.group_name, handle.rank, handle.world_size, backend
            )
            twin.transport = _C.Messages(shards, shards)
            for setting in _SETTINGS:
                setattr(twin.settings, setting, getattr(handle.settings, setting))
            if not handle.transport.can.bounds_buckets:
                twin.settings.bucket_bytes = _UNBOUNDED
            twin.shard = torch.empty_like(handle.shard, device="meta")
            twin.root = root
            twin.fqn = _PREFIX + name
            twin.register()
            twins[name] = twin
        yield twins
    finally:
        twins.clear()


_PREFIX = "simulated: "
_UNBOUNDED = 1 << 62
_SETTINGS = ("grad_dtype", "reduce_dtype", "shard_grad_dtype", "bucket_bytes", "divide_factor")


def _like(channel: _C.Channel, backend: str) -> _C.Channel:
    return _C.SimulatedChannel(channel.name, channel.rank, channel.world_size, backend)


def _in_backward(function: Callable[[], None]) -> None:
    """Calls a function inside a backward of autograd, where the runtime expects gradients."""
    with torch.enable_grad():
        root = torch.zeros(1, device="cpu", requires_grad=True).clone()
        root.register_hook(lambda _: function())
        root.backward()


@dataclass
class _InFlight:
    """A collective that has started."""

    op: str
    parameters: tuple[str, ...]
    end: float


_Started: TypeAlias = tuple[_C.Gather, list[_InFlight]]


@dataclass
class _Saved:
    """Memory that a forward leaves for its backward, under one name or several."""

    kind: str
    nbytes: int
    names: int = 0


class _Simulation:
    def __init__(
        self,
        parameters: Mapping[str, _C.Parameter],
        trained: Set[str],
        machine: Machine,
        optimizer_bytes: int,
        prefetch: bool,
        seconds_of: SecondsOf,
    ) -> None:
        self._parameters = parameters
        self._trained = trained
        self._machine = machine
        self._optimizer_bytes = optimizer_bytes
        self._prefetch = prefetch
        self._seconds_of = seconds_of
        self._now = 0.0  # seconds of the computation
        self._link_free = 0.0
        self._flops = self._product_seconds = 0.0
        self._spans: list[Span] = []
        self._alive: Counter[str] = Counter()
        self._memory: list[tuple[float, tuple[int, ...]]] = []
        self._traffic: dict[str, Traffic] = {}
        self._saved: dict[tuple[int, str], _Saved] = {}  # by graph number and name
        self._results: list[_Saved] = []  # outputs that only the caller reads
        self._reductions: list[_InFlight] = []
        self._others, _ = _C.meta_buffers(reset_peak=True)
        self._buffers = 0  # bytes of the runtime's, undelivered gradients included
        self._gathered: dict[fx.Node, int] = {}  # bytes, with padding
        self._gradients: dict[str, int] = {}  # bytes of their shards
        self._log = _C.CollectiveLog.start(on_meta=True)

    def run(self, forwards: Sequence[CapturedGraph], backwards: Sequence[CapturedGraph]) -> Step:
        shards = [parameter.shard for parameter in self._parameters.values()]
        trained = [self._parameters[name].shard for name in sorted(self._trained)]
        self._change("shards", sum(shard.nbytes for shard in shards))
        self._change("optimizer", sum(s.numel() for s in trained) * self._optimizer_bytes)
        try:
            for captured in forwards:
                used = self._trained & _gathered(captured.inlined.graph)
                _C.add_uses([self._parameters[name] for name in sorted(used)], False)
                self._run_graph(captured)
            self._forget_results()
            _in_backward(lambda: self._run_all(backwards))
            self._follow_reductions()
        finally:
            self._log.stop()
        while self._reductions:
            self._finish_reduction()
        self._follow_buffers()
        self._forget_results()
        self._step_optimizer(trained)
        name = f"predicted for {self._machine.name}"
        timeline = Timeline(name, tuple(self._spans), KINDS, tuple(self._memory))
        return Step(timeline, self._flops, self._product_seconds, self._traffic)

    def _run_all(self, graphs: Sequence[CapturedGraph]) -> None:
        for captured in graphs:
            self._run_graph(captured)

    def _run_graph(self, captured: CapturedGraph) -> None:
        graph = captured.inlined.graph
        self._number = captured.number
        items = items_of(graph)
        last_reader: dict[fx.Node, int] = {}
        for position, item in enumerate(items):
            last_reader |= dict.fromkeys(memory_of(item), position)
        dying: dict[int, list[fx.Node]] = {}
        for base, position in last_reader.items():
            dying.setdefault(position, []).append(base)
        stays = {base_of(node) for node in graph.output_node().all_input_nodes}
        gathers: dict[fx.Node, _Started] = {}
        for position, item in enumerate(items):
            if isinstance(item, Kernel):
                self._run_kernel(item)
            elif item.target is ops.all_gather_start.default:
                if self._prefetch:
                    gathers[item] = self._start_gather(item)
            elif item.target in WAITS:
                start: Any = item.args[0]
                started = gathers.pop(start) if start in gathers else self._start_gather(start)
                self._finish_gather(started, item)
            else:
                self._reduce(item)
            results = results_of(item)
            for node in results:
                if _kind(node) == "activations":
                    self._change("activations", nbytes_of(node))
            unread = [node for node in results if node not in last_reader]
            for node in [*unread, *dying.get(position, ())]:
                if node not in stays:
                    self._free(node)
        self._end_graph(graph)

    def _end_graph(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="placeholder"):
            self._free(node)  # saved but never read
        saved = saved_outputs(graph)
        by_base: dict[fx.Node, _Saved] = {}
        for node in graph.output_node().all_input_nodes:
            base = base_of(node)
            kind = _kind(base)
            if not kind:
                continue
            memory = by_base.setdefault(base, _Saved(kind, self._nbytes(base)))
            if node in saved:
                memory.names += 1
                self._saved[self._number, _saved_as(node)] = memory
        self._results += [memory for memory in by_base.values() if not memory.names]

    def _free(self, node: fx.Node) -> None:
        if node.op != "placeholder":
            if kind := _kind(node):
                self._change(kind, -self._nbytes(node))
        elif memory := self._saved.pop((self._number, _saved_as(node)), None):
            memory.names -= 1
            if not memory.names:
                self._change(memory.kind, -memory.nbytes)

    def _nbytes(self, node: fx.Node) -> int:
        return self._gathered.get(node, nbytes_of(node))

    def _forget_results(self) -> None:
        for memory in self._results:
            self._change(memory.kind, -memory.nbytes)
        self._results = []

    def _change(self, kind: str, nbytes: int) -> None:
        if nbytes:
            self._alive[kind] += nbytes
            self._note_memory()

    def _note_memory(self) -> None:
        self._alive["communication"] = max(self._buffers - self._alive["gradients"], 0)
        self._memory.append((self._now, tuple(self._alive[kind] for kind in KINDS)))

    def _run_kernel(self, kernel: Kernel) -> None:
        self._flops += kernel.flops
        self._product_seconds += kernel.flops / self._machine.flops_of(kernel.dtype)
        self._compute(
            kernel.name, kernel.flops, kernel.dtype, kernel.nbytes, seconds=self._seconds_of(kernel)
        )

    def _compute(
        self,
        name: str,
        flops: float,
        dtype: torch.dtype,
        nbytes: int,
        parameters: tuple[str, ...] = (),
        seconds: float | None = None,
    ) -> None:
        if seconds is None:
            seconds = self._machine.seconds_of_kernel(flops, dtype, nbytes)
        end = self._now + seconds
        self._spans.append(Span("compute", name, self._now, end, parameters, nbytes))
        self._now = end

    # ---- collectives

    def _start_gather(self, start: fx.Node) -> _Started:
        names = fqns_of(start)
        shards = sum(self._parameters[name].shard.nbytes for name in names)
        self._compute("cast", 0.0, torch.float32, 2 * shards, tuple(names))
        gather = _C.Gather([self._parameters[name] for name in names])
        self._follow_buffers()
        return gather, [self._launch("gather", record) for record in self._log.take()]

    def _finish_gather(self, started: _Started, wait: fx.Node) -> None:
        gather, collectives = started
        for collective in collectives:
            self._wait(collective)
        before, _ = _C.meta_buffers()
        fulls = gather.finish(fresh=True)
        _, peak = _C.meta_buffers()
        if peak > before:  # parameters that shared a buffer were copied out of it
            names = tuple(name for c in collectives for name in c.parameters)
            self._compute("unpack", 0.0, torch.float32, 2 * (peak - before), names)
        for position, full in gathered_items(wait):
            self._gathered[full] = fulls[position].untyped_storage().nbytes()
        del fulls  # the graph owns the tensors from here on
        self._follow_buffers()
        for _, full in gathered_items(wait):
            self._change("gathered", self._gathered[full])

    def _follow_buffers(self) -> None:
        """Records the bytes of the runtime's buffers, first at their peak, then now."""
        in_use, peak = _C.meta_buffers(reset_peak=True)
        for nbytes in (peak - self._others, in_use - self._others):
            if nbytes != self._buffers:
                self._buffers = nbytes
                self._note_memory()

    def _reduce(self, node: fx.Node) -> None:
        [name] = fqns_of(node)
        dtypes: GradientDtypes = node.meta[COMMENT]
        packed = dtypes.numel * dtypes.wire.itemsize
        if node.target is ops.reduce_mm.default:
            self._run_kernel(product_of(node))
        else:
            nbytes = packed + sum(map(nbytes_of, memory_of(node)))
            self._compute("pack", 0.0, dtypes.raw, nbytes, (name,))
        parameter = self._parameters[name]
        dtype = parameter.settings.shard_grad_dtype or dtypes.leaf or dtypes.raw
        self._gradients[name] = parameter.shard.numel() * dtype.itemsize
        meta = torch.device("meta")
        if node.target is ops.reduce_grad.default:
            _C.reduce(parameter, torch.empty(parameter.sizes, dtype=dtypes.raw, device=meta))
        else:  # the runtime computes the gradient into its own buffer
            _C.reduce(parameter, _C.empty_buffer(parameter.sizes, dtypes.raw, meta), owned=True)
        self._follow_reductions()
        self._follow_buffers()

    def _follow_reductions(self) -> None:
        """Launches reductions that the runtime has started; finishes those that it has awaited."""
        for record in self._log.take():
            while record.op == "all_reduce" and self._number_of("reduce_scatter") > 0:
                self._finish_reduction()
            while self._number_of(record.op) >= _C.MOST_IN_FLIGHT:
                self._finish_reduction()
            self._reductions.append(self._launch("reduce", record))

    def _number_of(self, op: str) -> int:
        return sum(other.op == op for other in self._reductions)

    def _finish_reduction(self) -> None:
        reduction = self._reductions.pop(0)
        self._wait(reduction)
        nbytes = sum(self._gradients[name] for name in reduction.parameters)
        self._compute("unpack", 0.0, torch.float32, 2 * nbytes, reduction.parameters)
        if reduction.op == "reduce_scatter":
            self._change("gradients", nbytes)

    def _launch(self, lane: str, record: _C.Collective) -> _InFlight:
        names = _names(record)
        ranks = self._ranks(record, self._parameters[names[0]])
        seconds = self._machine.seconds_of_collective(record.op, record.nbytes, ranks)
        local, remote = self._machine.bytes_over_links(record.op, record.nbytes, ranks)
        start = max(self._now, self._link_free)
        end = self._link_free = start + seconds
        self._spans.append(Span(lane, record.op, start, end, names, record.nbytes))
        self._stop_for(record.op, names, (1 - self._machine.overlap) * seconds)
        known = self._traffic.get(record.op, Traffic())
        self._traffic[record.op] = Traffic(
            known.number + 1,
            known.nbytes + record.nbytes,
            known.local + local,
            known.remote + remote,
            known.seconds + seconds,
        )
        return _InFlight(record.op, names, end)

    def _ranks(self, record: _C.Collective, parameter: _C.Parameter) -> Ranks:
        of_host = self._machine.ranks_per_host
        if record.op == "all_reduce":
            # Corresponding ranks of two replicas are a shard group's size apart.
            on_host = min(of_host // parameter.world_size, record.world_size)
            return Ranks(record.world_size, max(on_host, 1))
        return Ranks(record.world_size, min(of_host, record.world_size))

    def _wait(self, collective: _InFlight) -> None:
        self._stop_for(collective.op, collective.parameters, collective.end - self._now)

    def _stop_for(self, op: str, names: tuple[str, ...], seconds: float) -> None:
        if seconds > 0:
            self._spans.append(Span("waiting", op, self._now, self._now + seconds, names))
            self._now += seconds

    def _step_optimizer(self, shards: Sequence[torch.Tensor]) -> None:
        states = sum(shard.numel() for shard in shards) * self._optimizer_bytes
        nbytes = 2 * states + 3 * sum(shard.nbytes for shard in shards)
        seconds = self._machine.launch + nbytes / self._machine.update_bandwidth
        self._compute("optimizer", 0.0, torch.float32, nbytes, seconds=seconds)
        self._change("gradients", -self._alive["gradients"])


def _gathered(graph: fx.Graph) -> set[str]:
    """Returns the FQNs of the parameters that a graph gathers."""
    starts = graph.find_nodes(op="call_function", target=ops.all_gather_start.default)
    return {name for start in starts for name in fqns_of(start)}


def _names(record: _C.Collective) -> tuple[str, ...]:
    return tuple(name.removeprefix(_PREFIX) for name in record.params)


def _saved_as(node: fx.Node) -> str:
    """Returns the name that an output of a forward shares with the input of its backward."""
    if _kind(node) != "gathered":
        return node.meta.get(KEPT_OF, node.name)
    wait, position = node.args
    return fqns_of(wait.args[0])[position]  # type: ignore[union-attr, arg-type, index]


def _kind(node: fx.Node) -> str:
    """Returns the kind of a node's memory: "" if it owns none, or none to speak of."""
    if node.op != "call_function":
        return ""
    source: Any = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and source.target in WAITS:
        return "gathered" if node in {item for _, item in gathered_items(source)} else ""
    return "" if is_collective(node) or is_inlined(node) else "activations"
