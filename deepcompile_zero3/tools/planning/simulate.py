"""Simulates a step of rewritten graphs in the time that a machine would take.

The runtime itself runs, on the meta device and with channels that send nothing. The code that
trains therefore decides which parameters are gathered together, where gradients go and when a
bucket is sent.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import fx

from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.graph.capture import CapturedGraph, CapturedGraphs
from deepcompile_zero3.graph.metadata import COMMENT, formats_of, fqns_of
from deepcompile_zero3.graph.peak import gathered_items
from deepcompile_zero3.graph.size import nbytes_of
from deepcompile_zero3.passes.reduce import ReductionComment
from deepcompile_zero3.runtime import _C, LOADS, REDUCTIONS, STORES, WAITS, ops
from deepcompile_zero3.sharding.source import Source, parameters_behind
from deepcompile_zero3.tools.planning.kernels import Kernel, items_of, memory_of, results_of
from deepcompile_zero3.tools.planning.machine import Machine, Ranks
from deepcompile_zero3.tools.planning.measure import key_of
from deepcompile_zero3.tools.planning.memory import KINDS, Memory
from deepcompile_zero3.tools.planning.twins import Twin, names_in, twins_of
from deepcompile_zero3.tools.timeline import Span, Timeline

# Ends the kind of a collective between replicas that ranks of one replica have too.
OVER_REPLICAS = " over replicas"


@dataclass
class Traffic:
    """Collectives of a kind in a step of a rank."""

    number: int = 0
    nbytes: int = 0  #: of the full buffers
    local: float = 0.0  #: bytes that a rank receives from its host
    remote: float = 0.0  #: bytes that a rank receives from other hosts
    seconds: float = 0.0


class Moved(NamedTuple):
    """Bytes of a step that leave memory for a file, or a GPU for host memory, and that come back.
    Each gather of a shard in the file reads it, as ranks do that send messages. States of any size
    count, though small ones stay.
    """

    out: int = 0
    back: int = 0


class Slower(NamedTuple):
    """How many times as long as in a machine's model the kernels of forwards and backwards take."""

    forward: float = 1.0
    backward: float = 1.0


@dataclass(frozen=True)
class Assumptions:
    """What a simulation takes for given.

    Attributes:
        machine: the machine that the step runs on.
        optimizer_bytes: bytes of the optimizer's state for each element of a shard.
        prefetch: whether gathers start early. If False, a gather starts when it is waited for.
        seconds_by_kernel: measured seconds by kernel, from :func:`measure_kernels`.
        slower: how much longer kernels take than in the machine's model.
    """

    machine: Machine
    optimizer_bytes: int = 8
    prefetch: bool = True
    seconds_by_kernel: Mapping[str, float] = field(default_factory=dict)
    slower: Slower = field(default_factory=Slower)


@dataclass
class Step:
    """A simulated step."""

    timeline: Timeline
    flops: float  # of matrix products
    product_seconds: float  # of the products at least, at the machine's FLOP/s for their dtypes
    traffic: dict[str, Traffic]  # by kind of collective
    moved: Moved


def simulate(graphs: CapturedGraphs, sources: Mapping[str, Source], assumed: Assumptions) -> Step:
    """Simulates a step: the forwards, their backwards and the optimizer.

    Args:
        graphs: rewritten graphs. Each runs once; backwards run in the reverse order of forwards.
        sources: what the graphs gather, by FQN, and other parameters; they are not changed.
        assumed: the machine, and what else is taken for given.
    """
    parameters = parameters_behind(sources.values())
    stepped = {
        name: each.parameter.registered.local
        for name, each in sources.items()
        if each.placeholder.requires_grad
    }
    parts = sum(p.registered.local.nbytes for p in parameters if p.handle.has_parts)
    in_parts = {name for name in stepped if sources[name].parameter.handle.has_parts}
    budget = next((p.budget for p in parameters if p.budget), None)
    offloaded = {p for p in parameters if p.budget and p.budget.offloads(p)}
    in_file = {name for name, each in sources.items() if each in offloaded}
    states = math.inf if budget is None else budget.bytes_for_states(parameters)
    backwards = sorted(graphs.backward, key=lambda graph: graph.number, reverse=True)
    with twins_of(sources, assumed.machine.backend) as twins:
        simulation = _Simulation(twins, stepped, in_file, in_parts, assumed)
        simulation.reserve(states, parts)
        return simulation.run(graphs.forward, backwards)


_Started: TypeAlias = tuple[_C.Gather, list[Span]]  # a gather, and its collectives in flight


@dataclass
class _Simulation:
    twins: Mapping[str, Twin]
    stepped: Mapping[str, torch.Tensor]  # what this rank's optimizer steps, by the parameter's FQN
    in_file: Set[str]  # the parameters whose shards are in a file
    in_parts: Set[str]  # the parameters whose shards replicas step in parts
    assumed: Assumptions
    now: float = 0.0  # seconds of the computation
    link_free: float = 0.0
    flops: float = 0.0
    product_seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    reductions: list[Span] = field(default_factory=list)  # in flight
    gradients: dict[str, int] = field(default_factory=dict)  # bytes of their shards
    whole: set[str] = field(default_factory=set)  # parts that were gathered since the last step

    def __post_init__(self) -> None:
        self.machine = self.assumed.machine
        self.memory = Memory(lambda: self.now)
        self.log = _C.CollectiveLog.start(on_meta=True)
        self.factor = self.assumed.slower.forward  # of the kernels of the graph that runs

    def run(self, forwards: Sequence[CapturedGraph], backwards: Sequence[CapturedGraph]) -> Step:
        try:
            uses = []
            with _C.RecordedForward():
                for captured in forwards:
                    used = self.stepped.keys() & gathered_by(captured)
                    uses += [self.twins[name].placeholder for name in sorted(used)]
                    self._run_graph(captured)
            self.memory.forget_results()
            self._run_in_backward(backwards, uses)
            self._follow_reductions()
        finally:
            self.log.stop()
        while self.reductions:
            self._finish_reduction()
        self.memory.follow_buffers()
        self.memory.forget_results()
        self._step_optimizer(list(self.stepped.values()))
        name = f"predicted for {self.machine.name}"
        timeline = Timeline(name, tuple(self.spans), KINDS, tuple(self.memory.samples))
        moved = Moved(self.memory.moved_out, self.memory.moved_in)
        return Step(timeline, self.flops, self.product_seconds, self.traffic, moved)

    def reserve(self, most_states: float, parts: int) -> None:
        """Adds the memory of shards that are not in a file, of ``parts`` bytes of replicas' parts
        of them, and of ``most_states`` bytes of states at most. What is in a file comes and goes
        once, for the optimizer.
        """
        nbytes = {name: each.shard.nbytes for name, each in self.twins.items()}
        numel = sum(each.numel() for each in self.stepped.values())
        states = numel * self.assumed.optimizer_bytes
        here = int(min(states, most_states))
        in_memory = sum(nbytes[name] for name in nbytes.keys() - self.in_file)
        self.memory.change("shards", in_memory + parts)
        self.memory.change("optimizer", here)
        stepped = states - here + sum(nbytes[name] for name in self.stepped.keys() & self.in_file)
        self.memory.moved_out += stepped
        self.memory.moved_in += stepped

    def _run_in_backward(
        self, graphs: Sequence[CapturedGraph], uses: Sequence[torch.Tensor]
    ) -> None:
        """Runs graphs inside a backward of autograd, where the runtime expects gradients.

        Args:
            uses: the parameters' placeholders, each as often as forward graphs use it.
        """

        def run() -> None:
            self.factor = self.assumed.slower.backward
            for captured in graphs:
                self._run_graph(captured)

        with torch.enable_grad():
            root = torch.zeros(1, device="cpu", requires_grad=True)
            _Backward.apply(run, root, *uses).backward()

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
            first = item.nodes[0] if isinstance(item, Kernel) else item
            if isinstance(item, Kernel) and first.target not in (*STORES, *LOADS):
                self._run_kernel(item)
            if first.target is ops.all_gather_start.default and self.assumed.prefetch:
                gathers[first] = self._start_gather(first)
            elif first.target in WAITS:
                start: Any = first.args[0]
                started = gathers.pop(start, None) or self._start_gather(start)
                self._finish_gather(started, first)
            elif first.target in REDUCTIONS:
                self._reduce(first)
            results = results_of(item)
            for node in results:
                self.memory.compute(node)
            unread = [node for node in results if node not in last_reader]
            for node in [*unread, *dying.get(position, ())]:
                if node not in stays:
                    self.memory.free(node, captured.number)
        self.memory.end_graph(graph, captured.number)

    def _run_kernel(self, kernel: Kernel) -> None:
        self.flops += kernel.flops
        self.product_seconds += kernel.flops / self.machine.flops_of(kernel.dtype)
        measured = self.assumed.seconds_by_kernel
        seconds = measured.get(key_of(kernel)) if measured else None
        if seconds is None:
            seconds = self.machine.seconds_of_kernel(kernel.flops, kernel.dtype, kernel.nbytes)
            seconds *= self.factor
        self._compute(kernel.name, kernel.nbytes, seconds=seconds)

    def _compute(
        self, name: str, nbytes: int, parameters: Iterable[str] = (), seconds: float | None = None
    ) -> None:
        """Computes for ``seconds`` or, by default, for as long as it takes to move ``nbytes``."""
        if seconds is None:
            seconds = self.machine.seconds_of_kernel(0.0, torch.float32, nbytes)
        end = self.now + seconds
        self.spans.append(Span("compute", name, self.now, end, tuple(parameters), nbytes))
        self.now = end

    # ---- collectives

    def _start_gather(self, start: fx.Node) -> _Started:
        names = fqns_of(start)
        self._gather_parts([name for name in names if name in self.in_parts - self.whole])
        nbytes = {name: self.twins[name].shard.nbytes for name in names}
        self._compute("cast", 2 * sum(nbytes.values()), names)
        self.memory.moved_in += sum(nbytes[name] for name in names if name in self.in_file)
        formats = ",".join(formats_of(start))
        gather = _C.Gather([self.twins[name] for name in names], formats)
        self.memory.follow_buffers()
        return gather, [self._launch_record("gather", record) for record in self.log.take()]

    def _gather_parts(self, names: Sequence[str]) -> None:
        """Gathers the shards of ``names`` from the parts of replicas, as once after each step.

        The runtime starts all of these gathers with a forward, in this order.
        """
        if names:
            self.whole.update(names)
            parameter = self._parameter(names[0])
            replicas = cast(_C.Channel, parameter.replicas)
            nbytes = sum(self.twins[name].shard.nbytes for name in names)
            ranks = self._ranks_over_replicas(parameter, replicas.world_size)
            self._launch("gather", "all_gather", nbytes, ranks, tuple(names), over_replicas=True)

    def _finish_gather(self, started: _Started, wait: fx.Node) -> None:
        gather, collectives = started
        for collective in collectives:
            self._stop_for(collective, collective.end - self.now)
        before, _ = _C.meta_buffers()
        fulls = gather.finish(fresh=True)
        _, peak = _C.meta_buffers()
        if peak > before:  # parameters that shared a buffer were copied out of it
            names = [name for collective in collectives for name in collective.parameters]
            self._compute("unpack", 2 * (peak - before), names)
        gathered = {
            full: fulls[position].untyped_storage().nbytes()
            for position, full in gathered_items(wait)
        }
        del fulls  # the graph owns the tensors from here on
        self.memory.follow_buffers()
        for full, nbytes in gathered.items():
            self.memory.gather(full, nbytes)

    def _reduce(self, node: fx.Node) -> None:
        [name] = fqns_of(node)
        dtypes: ReductionComment = node.meta[COMMENT]
        if node.target is not ops.reduce_mm.default:  # reduce_mm packs its product
            packed = dtypes.numel * dtypes.wire.itemsize
            self._compute("pack", packed + sum(map(nbytes_of, memory_of(node))), [name])
        parameter = self._parameter(name)
        dtype = parameter.settings.gradient_dtypes.shard or dtypes.leaf or dtypes.raw
        self.gradients[name] = parameter.shard.numel() * dtype.itemsize
        meta = torch.device("meta")
        if node.target is ops.reduce_grad.default:
            _C.reduce(parameter, torch.empty(parameter.sizes, dtype=dtypes.raw, device=meta))
        else:  # the runtime computes the gradient into its own buffer
            _C.reduce(parameter, _C.empty_buffer(parameter.sizes, dtypes.raw, meta), owned=True)
        self._follow_reductions()
        self.memory.follow_buffers()

    def _follow_reductions(self) -> None:
        """Launches reductions that the runtime has started; finishes those that it has awaited."""
        for record in self.log.take():
            while record.op == "all_reduce" and self._number_of("reduce_scatter") > 0:
                self._finish_reduction()
            over_replicas = record.op == "all_reduce"
            most = _C.MAX_REPLICA_SUMS if over_replicas else _C.MAX_IN_FLIGHT
            while self._number_of(record.op) >= most:
                self._finish_reduction()
            self.reductions.append(self._launch_record("reduce", record))

    def _number_of(self, op: str) -> int:
        """Returns how many reductions are in flight, over replicas if ``op`` is "all_reduce"."""
        over_replicas = sum(each.name != "reduce_scatter" for each in self.reductions)
        return over_replicas if op == "all_reduce" else len(self.reductions) - over_replicas

    def _finish_reduction(self) -> None:
        reduction = self.reductions.pop(0)
        self._stop_for(reduction, reduction.end - self.now)
        nbytes = sum(self.gradients[name] for name in reduction.parameters)
        self._compute("unpack", 2 * nbytes, reduction.parameters)
        if reduction.name == "reduce_scatter":
            self.memory.change("gradients", nbytes)
        elif reduction.name != "all_reduce":  # of the shard's gradient, this replica keeps its part
            replicas = cast(_C.Channel, self._parameter(reduction.parameters[0]).replicas)
            self.memory.change("gradients", nbytes // replicas.world_size - nbytes)

    def _launch_record(self, lane: str, record: _C.Collective) -> Span:
        names = names_in(record)
        twin = self.twins[names[0]]
        if record.op != "all_reduce":
            ranks = Ranks(record.world_size, min(self.machine.ranks_per_host, record.world_size))
            return self._launch(lane, record.op, record.nbytes, ranks, names)
        ranks = self._ranks_over_replicas(twin, record.world_size)
        if self.in_parts.isdisjoint(names):  # twins have no parts
            return self._launch(lane, record.op, record.nbytes, ranks, names)
        return self._launch(lane, "reduce_scatter", record.nbytes, ranks, names, over_replicas=True)

    def _launch(
        self,
        lane: str,
        op: str,
        nbytes: int,
        ranks: Ranks,
        names: tuple[str, ...],
        over_replicas: bool = False,
    ) -> Span:
        seconds = self.machine.seconds_of_collective(op, nbytes, ranks)
        local, remote = self.machine.bytes_over_links(op, nbytes, ranks)
        name = op + OVER_REPLICAS if over_replicas else op
        start = max(self.now, self.link_free)
        self.link_free = start + seconds
        launched = Span(lane, name, start, self.link_free, names, nbytes)
        self.spans.append(launched)
        self._stop_for(launched, (1 - self.machine.overlap) * seconds)
        traffic = self.traffic.setdefault(name, Traffic())
        traffic.number += 1
        traffic.nbytes += nbytes
        traffic.local += local
        traffic.remote += remote
        traffic.seconds += seconds
        return launched

    def _parameter(self, name: str) -> _C.Parameter:
        return cast(_C.Parameter, self.twins[name])  # it has gradients

    def _ranks_over_replicas(self, twin: Twin, replicas: int) -> Ranks:
        # Corresponding ranks of two replicas are a shard group's size apart.
        on_host = min(self.machine.ranks_per_host // twin.world_size, replicas)
        return Ranks(replicas, max(on_host, 1))

    def _stop_for(self, collective: Span, seconds: float) -> None:
        if seconds > 0:
            start, self.now = self.now, self.now + seconds
            names = collective.parameters
            self.spans.append(Span("waiting", collective.name, start, self.now, names))

    def _step_optimizer(self, shards: Sequence[torch.Tensor]) -> None:
        states = sum(shard.numel() for shard in shards) * self.assumed.optimizer_bytes
        nbytes = 2 * states + 3 * sum(shard.nbytes for shard in shards)
        seconds = self.machine.launch + nbytes / self.machine.update_bandwidth
        self._compute("optimizer", nbytes, seconds=seconds)
        self.memory.change("gradients", -self.memory.alive["gradients"])


class _Backward(torch.autograd.Function):
    """Calls ``run`` in backward, in place of what would bring ``uses`` their gradients."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], None], root: torch.Tensor, *uses: torch.Tensor) -> Any:
        ctx.run, ctx.num_inputs = run, 2 + len(uses)
        return root.clone()

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        ctx.run()
        return (None,) * ctx.num_inputs


def gathered_by(captured: CapturedGraph) -> set[str]:
    """Returns the FQNs of the parameters that a graph gathers."""
    start = ops.all_gather_start.default
    starts = captured.inlined.graph.find_nodes(op="call_function", target=start)
    return {name for node in starts for name in fqns_of(node)}
