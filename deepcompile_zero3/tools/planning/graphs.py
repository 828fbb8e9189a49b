"""Traces the graphs of a step: the model has no data, and the ranks need not exist."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.backend import CompiledGraph, pipeline_of
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.capture import CapturedGraphs, capture_graphs
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.pipeline import Pipeline
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.registered import all_parameters_of
from deepcompile_zero3.tools.explain import without_a_trace
from deepcompile_zero3.tools.report import line_of_break
from deepcompile_zero3.torch_internals import compiler


@dataclass(frozen=True)
class _Partitioned:
    """A forward or backward graph before this library's passes."""

    of: Pipeline
    graph_module: fx.GraphModule
    is_backward: bool


@dataclass(frozen=True)
class Trace:
    """A call of a sharded model, partitioned into forward and backward.

    Attributes:
        model: the sharded model, on the meta device.
        parameters: the model's sharded parameters, by FQN.
        breaks: where and why Dynamo broke the graph.
    """

    model: nn.Module
    parameters: Mapping[str, ShardedParameter]
    breaks: tuple[str, ...]
    _graphs: tuple[_Partitioned, ...]

    def rewrite(self, options: Options) -> CapturedGraphs:
        """Returns the graphs that the passes rewrite, in the order of compilation."""
        rewritings: dict[Pipeline, Pipeline] = {}
        with capture_graphs() as graphs:
            for graph in self._graphs:
                inputs = graph.of.inputs
                parameters = [self.parameters[facts.fqn] for facts in inputs.values()]
                if graph.of not in rewritings:
                    rewritings[graph.of] = pipeline_of(parameters, inputs, options)
                rewritings[graph.of](copy.deepcopy(graph.graph_module), graph.is_backward)
        return graphs


@contextlib.contextmanager
def fake_ranks(world_size: int, replicas: int = 1) -> Iterator[DeviceMesh]:
    """Yields a mesh of ranks: this process is rank 0, and the other ranks do not exist.

    Args:
        world_size: the number of ranks of all replicas.
        replicas: the number of replicas; a model is sharded over the ranks of one replica.

    Raises:
        Zero3Error: the process has a process group.
        ValueError: a number is not positive, or ``replicas`` does not divide ``world_size``.
    """
    if dist.is_initialized():
        raise Zero3Error(
            "a plan needs a process without a process group, since it makes one of ranks that do "
            "not exist: make it in a process of its own, or call destroy_process_group() first"
        )
    if world_size < 1:
        raise ValueError(f"a plan needs a positive number of ranks, got {world_size}")
    if replicas < 1 or world_size % replicas:
        raise ValueError(
            f"replicas is a divisor of the number of ranks, {world_size}; got {replicas}"
        )
    dist.init_process_group(
        "fake", rank=0, world_size=world_size, store=torch_internals.new_fake_store()
    )
    try:
        shape = (world_size,) if replicas == 1 else (replicas, world_size // replicas)
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def trace(model: nn.Module, call: Mapping[str, Any]) -> Trace:
    """Traces ``model(**call)`` and its backward without computing anything.

    Args:
        model: a model sharded over :func:`fake_ranks`, on the meta device. Its buffers and its
            parameters that are not sharded get memory on the CPU.
        call: keyword arguments of the call; tensors on the CPU, whose values do not matter.

    Raises:
        Zero3Error: no graph was compiled, or code outside the graphs reads parameters.
    """
    parameters = all_parameters_of(model, "plan")
    _materialise(model)
    graphs: list[_Partitioned] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> CompiledGraph:
        return CompiledGraph(
            gm,
            example_inputs,
            Options(regions=False),
            functools.partial(_note_and_return_zeros, graphs),
        )

    try:
        with compiler.graph_breaks() as breaks, without_a_trace(model, parameters):
            compiler.call_compiled_apart(model, backend, (), dict(call))
    except Zero3Error as error:
        if not breaks:
            raise
        raise Zero3Error(
            "this model cannot be planned: code that is not compiled reads its parameters, which "
            "have no data here. A break inside of a loop leaves the whole function uncompiled; "
            f"{line_of_break(breaks[0])}"
        ) from error
    check_compiled(graphs)
    by_name = {parameter.fqn: parameter for parameter in parameters}
    return Trace(model, by_name, tuple(breaks), tuple(graphs))


def check_compiled(graphs: Sequence[Any]) -> None:
    """Raises Zero3Error if a call has compiled no graph."""
    if not graphs:
        raise Zero3Error("no graph was compiled: is torch.compile disabled, or the whole call?")


def _note_and_return_zeros(
    graphs: list[_Partitioned],
    rewriting: Pipeline,
    graph_module: fx.GraphModule,
    example_inputs: Any,
    **kwargs: Any,
) -> Callable:
    is_backward = bool(kwargs.get("is_backward"))
    noted = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    graphs.append(_Partitioned(rewriting, noted, is_backward))
    outputs: Any = graph_module.graph.output_node().args[0]
    results = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]

    def run(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return [zeros_like(result) for result in results]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def zeros_like(value: Any) -> Any:
    """Returns zeros of the same shape, in the memory of one element."""
    if isinstance(value, torch.Tensor):
        sizes = [int(size) for size in value.shape]
        return torch.zeros((), dtype=value.dtype).expand(sizes)
    return int(value) if isinstance(value, torch.SymInt) else value


def _materialise(model: nn.Module) -> None:
    whole: dict[torch.Tensor, nn.Parameter] = {}  # parameters that are not sharded, once each
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.zeros_like(buffer, device="cpu"))
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta and not isinstance(parameter, DTensor):
                if parameter not in whole:
                    data = torch.empty_like(parameter, device="cpu")
                    whole[parameter] = nn.Parameter(data, parameter.requires_grad)
                setattr(module, name, whole[parameter])
