"""Predicts a measured step from the graphs that ran in it."""

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.capture import CapturedGraph, CapturedGraphs
from deepcompile_zero3.graph.size import nbytes_of_tensor
from deepcompile_zero3.sharding.model import sources_beside
from deepcompile_zero3.sharding.source import Source, parameters_behind
from deepcompile_zero3.tools.planning.kernels import Kernel, kernels_of
from deepcompile_zero3.tools.planning.machine import MACHINES, Machine
from deepcompile_zero3.tools.planning.measure import (
    key_of,
    measure_device,
    measure_kernels,
    measure_links,
)
from deepcompile_zero3.tools.planning.simulate import (
    OVER_REPLICAS,
    Assumptions,
    gathered_by,
    simulate,
)
from deepcompile_zero3.tools.timeline import Timeline
from deepcompile_zero3.tools.tracing.profile import Event, collectives_of
from deepcompile_zero3.torch_internals import dynamo_runs, local_tensor
from deepcompile_zero3.transport.json_collectives import all_gather_json
from deepcompile_zero3.transport.on_all_ranks import line_of, on_all_ranks

_Profiled: TypeAlias = tuple[Sequence[Event], Event]  # all events, and the range of a step
_Parameters: TypeAlias = Mapping[str, Source]

_BY_MESSAGES = (
    "predicted is a step whose ranks exchange messages; these share memory, and their waits and "
    "flights are other ones"
)


@dataclass(frozen=True)
class Prediction:
    """A predicted step, or the reason why there is none.

    Attributes:
        timeline: the predicted step.
        remark: the reason why there is no timeline, or how it differs from the measured step.
    """

    timeline: Timeline | None = None
    remark: str = ""


def predict(
    captured: CapturedGraphs,
    machine: Machine | None,
    numbers: Mapping[str, float],
    profiled: _Profiled | None,
    optimizers: Collection[Optimizer],
) -> Prediction:
    """Predicts a step from the graphs that ran in it, or remarks why it cannot; it never raises.

    Args:
        captured: all graphs that the process has compiled.
        machine: if None, the ranks measure their own machine, which takes about a minute and is
            collective: all ranks of the job call this.
        numbers: numbers that replace the machine's: see :meth:`Machine.with_numbers`.
        profiled: the events and the range of the step, or None if they could not be read.
        optimizers: the optimizers that have stepped.
    """
    try:
        seconds = None
        if machine is None:
            graphs, parameters, mesh, kernels = on_all_ranks(
                "trace", lambda: _what_to_measure(captured, profiled)
            )
            machine, seconds = _measure(mesh, kernels)
        else:
            graphs, parameters = _what_ran(captured, profiled)
        machine, states = machine.with_numbers(**numbers), _optimizer_bytes(optimizers, parameters)
        assumed = Assumptions(machine, states, seconds_by_kernel=seconds or {})
        found = simulate(graphs, parameters, assumed)
        return Prediction(found.timeline, _BY_MESSAGES if _share_memory(parameters) else "")
    except Exception as error:  # the measured step is reported anyway
        return Prediction(remark=line_of(error))


# ---- what ran


def _what_ran(
    captured: CapturedGraphs, profiled: _Profiled | None
) -> tuple[CapturedGraphs, _Parameters]:
    """Returns the graphs that ran in the step, and their parameters by FQN.

    Raises:
        Zero3Error: a step that runs each graph once would differ from the measured step, or would
            send something else.
    """
    if profiled is None:
        raise Zero3Error("a profile could not be read")
    events, step = profiled
    inside = [event.name for event in events if step.start <= event.start < step.end]
    runs = Counter(
        name.removeprefix(dynamo_runs.REGION)
        for name in inside
        if name.startswith(dynamo_runs.REGION)
    )
    # A region that was compiled again, after a reset, is represented by its latest graph.
    latest = {graph.compile_id: graph for graph in captured.forward}
    forward = [graph for graph in latest.values() if graph.compile_id in runs]
    numbers = {graph.number for graph in forward}
    backward = [graph for graph in captured.backward if graph.number in numbers]
    if not forward:
        raise Zero3Error('no graph of torch.compile(..., backend="zero3") ran in the step')
    for graph in forward:
        _check_run(graph, runs[graph.compile_id], backward)
    names = {name for graph in forward + backward for name in gathered_by(graph)}
    parameters = sources_beside(names)
    if not names or names - parameters.keys():
        raise Zero3Error("no model is sharded whose graphs ran in the step")
    behind = parameters_behind(parameters.values())
    if any(each.layout.inner is not None for each in behind):
        raise Zero3Error("ranks that share a tensor's computation are not planned")
    ran = CapturedGraphs(forward, backward)
    if not _share_memory(parameters):
        sent = collectives_of(events, step)
        any_machine = Assumptions(MACHINES["h100"])
        traffic = simulate(ran, parameters, any_machine).traffic
        planned: dict[str, tuple[int, int]] = {}
        for kind, each in traffic.items():
            op = kind.removesuffix(OVER_REPLICAS)  # as ranges of a profile name it
            number, nbytes = planned.get(op, (0, 0))
            planned[op] = number + each.number, nbytes + each.nbytes
        if sent != planned:
            raise Zero3Error(
                f"the step sends {_told(sent)}, and its graphs {_told(planned)}: code that is not "
                "compiled takes part, or the script evaluates between two steps"
            )
    return ran, parameters


def _check_run(forward: CapturedGraph, runs: int, backward: Collection[CapturedGraph]) -> None:
    """Raises Zero3Error unless a graph ran once, with its backward, at fixed sizes."""
    region = f"the compiled region {forward.compile_id}"
    if runs > 1:
        raise Zero3Error(f"{region} ran {runs} times in the step, and a plan takes each once")
    if not any(graph.number == forward.number for graph in backward):
        raise Zero3Error(f"{region} ran in the step without a backward")
    inputs = forward.inlined.graph.find_nodes(op="placeholder")
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in inputs):
        raise Zero3Error(f"{region} is of sizes that change")


def _share_memory(parameters: _Parameters) -> bool:
    return not all(p.handle.can.sends_messages for p in parameters.values())


def _optimizer_bytes(optimizers: Collection[Optimizer], parameters: _Parameters) -> int:
    """Returns the bytes of the optimizers' state for each element of a shard."""
    behind = parameters_behind(parameters.values())
    shards = [p.shard for p in behind if p.placeholder.requires_grad]
    nbytes = sum(
        nbytes_of_tensor(getattr(value, "_local_tensor", value))
        for shard in shards
        for optimizer in optimizers
        for value in optimizer.state.get(shard, {}).values()
        if isinstance(value, torch.Tensor)
    )
    return round(nbytes / max(sum(local_tensor(shard).numel() for shard in shards), 1))


# ---- the machine at hand


def _what_to_measure(
    captured: CapturedGraphs, profiled: _Profiled | None
) -> tuple[CapturedGraphs, _Parameters, DeviceMesh, dict[str, Kernel]]:
    """Returns the graphs, their parameters, the parameters' mesh, and kernels by :func:`key_of`.

    Raises:
        Zero3Error: parameters lie on several meshes, or on one of two dimensions; or the measured
            step cannot be predicted.
    """
    graphs, parameters = _what_ran(captured, profiled)
    behind = parameters_behind(parameters.values())
    mesh, *others = {each.layout.mesh for each in behind}
    if others or mesh.ndim != 1:
        raise Zero3Error("the machine at hand is measured over one mesh of one dimension")
    if mesh.device_type != "cpu":
        return graphs, parameters, mesh, {}
    kernels = {
        key_of(kernel): kernel
        for graph in (*graphs.forward, *graphs.backward)
        for kernel in kernels_of(graph.inlined.graph)
    }
    return graphs, parameters, mesh, kernels


def _measure(mesh: DeviceMesh, kernels: Mapping[str, Kernel]) -> tuple[Machine, dict[str, float]]:
    """Returns the machine, and seconds of each kernel on the slowest rank. Collective."""
    group = mesh.get_group()
    on_all_ranks("trace", lambda: _check_alike([*kernels], group))
    if dist.get_rank() == 0:
        what = f"{len(kernels)} kinds of kernels and " if kernels else ""
        text = f"trace: measures {what}the machine, which takes a minute or so"
        print(text, file=sys.stderr, flush=True)
    device = torch.device(mesh.device_type)
    devices = [] if mesh.device_type == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices), torch.enable_grad():
        alone = on_all_ranks("trace", lambda: measure_device(device, "these ranks"))
        machine = measure_links(mesh, alone)
        mine = on_all_ranks("trace", lambda: _seconds(kernels, group))
    of_ranks = all_gather_json("trace", list(mine.values()), group)
    return machine, dict(zip(mine, max(of_ranks, key=sum), strict=True))


def _check_alike(kernels: list[str], group: dist.ProcessGroup) -> None:
    if any(theirs != kernels for theirs in all_gather_json("trace", kernels, group)):
        raise Zero3Error("ranks run different graphs")


def _seconds(kernels: Mapping[str, Kernel], group: dist.ProcessGroup) -> dict[str, float]:
    """Returns seconds of each kernel; an error here does not leave other ranks in a barrier."""
    barriers = iter([lambda: dist.barrier(group)] * len(kernels))
    try:
        return measure_kernels(kernels.values(), between=lambda: next(barriers)())
    finally:
        for barrier in barriers:
            barrier()


# ---- words


def _told(collectives: Mapping[str, tuple[int, int]]) -> str:
    told = (f"{n} {op} of {nbytes / 2**20:,.3f} MiB" for op, (n, nbytes) in collectives.items())
    return ", ".join(told) or "nothing"
