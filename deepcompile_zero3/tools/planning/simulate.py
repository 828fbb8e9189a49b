"""Simulates a step of rewritten graphs in the time that a machine would take.

The runtime itself runs, on the meta device and with channels that send nothing. The code that
trains therefore decides which parameters are gathered together, where gradients go and when a
bucket is sent.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.graph.capture import CapturedGraph, CapturedGraphs
from deepcompile_zero3.graph.metadata import COMMENT, fqns_of
from deepcompile_zero3.graph.peak import gathered_items
from deepcompile_zero3.graph.size import nbytes_of
from deepcompile_zero3.passes.reduce import ReductionComment
from deepcompile_zero3.runtime import _C, WAITS, ops
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.tools.planning.kernels import (
    Kernel,
    items_of,
    memory_of,
    product_of,
    results_of,
)
from deepcompile_zero3.tools.planning.machine import Machine, Ranks
from deepcompile_zero3.tools.planning.memory import KINDS, Memory
from deepcompile_zero3.tools.planning.twins import names_in, twins_of
from deepcompile_zero3.tools.timeline import Span, Timeline

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
    with twins_of(parameters, machine.backend) as twins:
        simulation = _Simulation(twins, trained, machine, optimizer_bytes, prefetch, seconds_of)
        return simulation.run(graphs.forward, backwards)


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
        self._memory = Memory(lambda: self._now)
        self._traffic: dict[str, Traffic] = {}
        self._reductions: list[_InFlight] = []
        self._gradients: dict[str, int] = {}  # bytes of their shards
        self._log = _C.CollectiveLog.start(on_meta=True)

    def run(self, forwards: Sequence[CapturedGraph], backwards: Sequence[CapturedGraph]) -> Step:
        shards = [parameter.shard for parameter in self._parameters.values()]
        trained = [self._parameters[name].shard for name in sorted(self._trained)]
        self._memory.change("shards", sum(shard.nbytes for shard in shards))
        self._memory.change("optimizer", sum(s.numel() for s in trained) * self._optimizer_bytes)
        try:
            for captured in forwards:
                used = self._trained & _gathered(captured.inlined.graph)
                _C.add_uses([self._parameters[name] for name in sorted(used)], False)
                self._run_graph(captured)
            self._memory.forget_results()
            _in_backward(lambda: self._run_all(backwards))
            self._follow_reductions()
        finally:
            self._log.stop()
        while self._reductions:
            self._finish_reduction()
        self._memory.follow_buffers()
        self._memory.forget_results()
        self._step_optimizer(trained)
        name = f"predicted for {self._machine.name}"
        timeline = Timeline(name, tuple(self._spans), KINDS, tuple(self._memory.points))
        return Step(timeline, self._flops, self._product_seconds, self._traffic)

    def _run_all(self, graphs: Sequence[CapturedGraph]) -> None:
        for captured in graphs:
            self._run_graph(captured)

    def _run_graph(self, captured: CapturedGraph) -> None:
        graph = captured.inlined.graph
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
                self._memory.compute(node)
            unread = [node for node in results if node not in last_reader]
            for node in [*unread, *dying.get(position, ())]:
                if node not in stays:
                    self._memory.free(node, captured.number)
        self._memory.end_graph(graph, captured.number)

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
        self._memory.follow_buffers()
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
        gathered = {
            full: fulls[position].untyped_storage().nbytes()
            for position, full in gathered_items(wait)
        }
        del fulls  # the graph owns the tensors from here on
        self._memory.follow_buffers()
        for full, nbytes in gathered.items():
            self._memory.gather(full, nbytes)

    def _reduce(self, node: fx.Node) -> None:
        [name] = fqns_of(node)
        dtypes: ReductionComment = node.meta[COMMENT]
        packed = dtypes.numel * dtypes.wire.itemsize
        if node.target is ops.reduce_mm.default:
            self._run_kernel(product_of(node))
        else:
            nbytes = packed + sum(map(nbytes_of, memory_of(node)))
            self._compute("pack", 0.0, dtypes.raw, nbytes, (name,))
        parameter = self._parameters[name]
        dtype = parameter.settings.gradient_dtypes.shard or dtypes.leaf or dtypes.raw
        self._gradients[name] = parameter.shard.numel() * dtype.itemsize
        meta = torch.device("meta")
        if node.target is ops.reduce_grad.default:
            _C.reduce(parameter, torch.empty(parameter.sizes, dtype=dtypes.raw, device=meta))
        else:  # the runtime computes the gradient into its own buffer
            _C.reduce(parameter, _C.empty_buffer(parameter.sizes, dtypes.raw, meta), owned=True)
        self._follow_reductions()
        self._memory.follow_buffers()

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
            self._memory.change("gradients", nbytes)

    def _launch(self, lane: str, record: _C.Collective) -> _InFlight:
        names = names_in(record)
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
        self._memory.change("gradients", -self._memory.alive["gradients"])


def _gathered(graph: fx.Graph) -> set[str]:
    """Returns the FQNs of the parameters that a graph gathers."""
    starts = graph.find_nodes(op="call_function", target=ops.all_gather_start.default)
    return {name for start in starts for name in fqns_of(start)}
