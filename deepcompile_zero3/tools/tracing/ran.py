"""Finds the graphs that ran in a profiled step."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.capture import CapturedGraph, CapturedGraphs
from deepcompile_zero3.sharding.extension import owner_of
from deepcompile_zero3.sharding.model import parameters_beside
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.tools.planning.simulate import gathered_by
from deepcompile_zero3.tools.tracing.profile import Event
from deepcompile_zero3.torch_internals import compiler
from deepcompile_zero3.transport.json_collectives import all_gather_json

_Result = TypeVar("_Result")
Parameters: TypeAlias = Mapping[str, ShardedParameter]


class Ran(NamedTuple):
    """The graphs that ran in a step, and how often each."""

    graphs: CapturedGraphs
    parameters: Parameters  # by FQN: those of the graphs' models
    times: int

    @property
    def share_memory(self) -> bool:
        """Whether some ranks gather from shared memory."""
        return not all(p.handle.can.sends_messages for p in self.parameters.values())

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the parameters.

        Raises:
            Zero3Error: they lie on several meshes, or on one of two dimensions.
        """
        mesh, *others = {owner_of(each).layout.mesh for each in self.parameters.values()}
        if others or mesh.ndim != 1:
            raise Zero3Error("the machine at hand is measured over one mesh of one dimension")
        return mesh


def what_ran(captured: CapturedGraphs, events: Sequence[Event], step: Event) -> Ran:
    """Returns the graphs among ``captured`` that ran in a step.

    Args:
        captured: all graphs that the process has compiled.
        events: the events of a profile.
        step: the range of the step in it.

    Raises:
        Zero3Error: a simulated step would differ from this one: some graphs ran more often than
            others, without their backwards or with sizes that change, or none ran.
    """
    inside = [event.name for event in events if step.start <= event.start < step.end]
    runs = Counter(
        name.removeprefix(compiler.REGION) for name in inside if name.startswith(compiler.REGION)
    )
    # A region that was compiled again, after a reset, is represented by its latest graph.
    latest = {graph.compile_id: graph for graph in captured.forward}
    forward = [graph for graph in latest.values() if graph.compile_id in runs]
    numbers = {graph.number for graph in forward}
    backward = [graph for graph in captured.backward if graph.number in numbers]
    if not forward:
        raise Zero3Error('no graph of torch.compile(..., backend="zero3") ran in the step')
    times = runs[forward[0].compile_id]
    for graph in forward:
        _check_run(graph, runs[graph.compile_id], times, backward)
    names = {name for graph in forward + backward for name in gathered_by(graph)}
    parameters = parameters_beside(names)
    if not names or names - parameters.keys():
        raise Zero3Error("no model is sharded whose graphs ran in the step")
    owners = [owner_of(each) for each in parameters.values()]
    if any(owner.layout.inner is not None for owner in owners):
        raise Zero3Error("ranks that share a tensor's computation are not planned")
    return Ran(CapturedGraphs(forward, backward), parameters, times)


def _check_run(
    forward: CapturedGraph, runs: int, times: int, backward: Collection[CapturedGraph]
) -> None:
    """Raises Zero3Error unless a graph ran so many times, with its backward, at fixed sizes."""
    region = f"the compiled region {forward.compile_id}"
    if runs != times:
        raise Zero3Error(f"{region} ran {runs} times in the step, and another one {times} times")
    if not any(graph.number == forward.number for graph in backward):
        raise Zero3Error(f"{region} ran in the step without a backward")
    inputs = forward.inlined.graph.find_nodes(op="placeholder")
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in inputs):
        raise Zero3Error(f"{region} is of sizes that change")


def on_all_ranks(
    what: str, function: Callable[[], _Result], group: dist.ProcessGroup | None = None
) -> _Result:
    """Returns the result of ``function``; raises on all ranks if it raises on one. Collective.

    Raises:
        Zero3Error: it raised on a rank, and this is the first line of the error.
    """
    result, error = None, ""
    try:
        result = function()
    except Exception as raised:
        error = line_of(raised)
    everyone = group or dist.group.WORLD
    errors = [error] if everyone is None else all_gather_json(what, error, everyone)
    for each in filter(None, errors):
        raise Zero3Error(each)
    return result  # type: ignore[return-value]


def line_of(error: Exception) -> str:
    """Returns the first line of an error, with its type unless this library raised it."""
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, Zero3Error) else f"{type(error).__name__}: {first}"
