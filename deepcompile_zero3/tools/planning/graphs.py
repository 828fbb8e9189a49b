"""A model without data, sharded over ranks that need not exist, and the graphs of its step."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.backend import CompiledGraph
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.calls import copied
from deepcompile_zero3.graph.capture import CapturedGraph, CapturedGraphs
from deepcompile_zero3.graph_inputs import format_of_gather, pipeline_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.pipeline import Pipeline
from deepcompile_zero3.sharding.fully_shard import fully_shard
from deepcompile_zero3.sharding.model import ShardedModel, by_fqn
from deepcompile_zero3.sharding.module_parameters import all_parameters_of, registered_in
from deepcompile_zero3.sharding.source import Source, parameters_behind
from deepcompile_zero3.tools.explain import without_a_trace
from deepcompile_zero3.tools.progress import Tell, say_nothing
from deepcompile_zero3.tools.report import line_of_break
from deepcompile_zero3.torch_internals import compiler, dynamo_runs

ShardModel: TypeAlias = Callable[[nn.Module, DeviceMesh], Any]


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
    check_ranks(world_size, replicas)
    dist.init_process_group(
        "fake", rank=0, world_size=world_size, store=torch_internals.new_fake_store()
    )
    try:
        shape = (world_size,) if replicas == 1 else (replicas, world_size // replicas)
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def check_ranks(world_size: int, replicas: int) -> None:
    """Raises ValueError if a number is not positive, or ``replicas`` does not divide the ranks."""
    if world_size < 1:
        raise ValueError(f"a plan needs a positive number of ranks, got {world_size}")
    if replicas < 1 or world_size % replicas:
        raise ValueError(
            f"replicas is a divisor of the number of ranks, {world_size}; got {replicas}"
        )


@contextlib.contextmanager
def fake_model(
    build: Callable[[], nn.Module],
    call: Mapping[str, Any],
    world_size: int,
    replicas: int,
    shard: ShardModel | None,
) -> Iterator[nn.Module]:
    """Yields a sharded model on the meta device, on :func:`fake_ranks`: see :func:`plan`.

    Raises:
        TypeError: ``build`` does not return a module, or ``call`` is not a mapping.
    """
    if isinstance(build, nn.Module):
        raise TypeError("build is called and makes the model: give its class or a function")
    if not isinstance(call, Mapping):
        raise TypeError(f"call is a dict of keyword arguments, got {type(call).__name__}")
    with fake_ranks(world_size, replicas) as mesh:
        with torch.device("meta"):
            model = build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"build makes the model and nothing else, got {type(model).__name__}")
        (shard or shard_blocks)(model, mesh)
        parameters = registered_in(model)
        try:
            yield model
        finally:  # the models take no more steps, and others may have their numbers
            for sharded in {parameter.model for parameter in parameters} - {None}:
                cast(ShardedModel, sharded).retire()


def shard_blocks(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> nn.Module:
    """Shards each module of the model's lists, and the rest with the model.

    Args:
        model: a model whose blocks are the modules of its outermost ``nn.ModuleList`` and
            ``nn.Sequential`` containers.
        mesh: the mesh that parameters are sharded over.
        settings: further arguments of :func:`fully_shard`.

    Returns:
        The sharded model.
    """
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return list(module)
    return [block for child in module.children() for block in _blocks(child)]


def zeros_like(value: Any) -> Any:
    """Returns zeros of the same shape, in the memory of one element."""
    if isinstance(value, torch.Tensor):
        sizes = [int(size) for size in value.shape]
        return torch.zeros((), dtype=value.dtype).expand(sizes)
    return int(value) if isinstance(value, torch.SymInt) else value


# ---- its graphs


@dataclass(frozen=True)
class Trace:
    """A call of a sharded model, partitioned into forward and backward."""

    sources: Mapping[str, Source]  # by FQN
    breaks: tuple[str, ...]  # where and why Dynamo broke the graph
    # Graphs before this library's passes, and whether they are backwards.
    partitioned: Sequence[tuple[Pipeline, fx.GraphModule, bool]]

    def rewrite(self, options: Options, shows_passes: bool = False) -> CapturedGraphs:
        """Returns the graphs that the passes rewrite, in the order of compilation.

        If it ``shows_passes``, ``capture_graphs(passes=True)`` sees them.
        """
        pipelines: dict[Pipeline, Pipeline] = {}
        graphs = CapturedGraphs()
        for traced, graph_module, is_backward in self.partitioned:
            if traced not in pipelines:
                sources = [self.sources[facts.fqn] for facts in traced.inputs.values()]
                inputs = {
                    position: facts.gathered_as(format_of_gather(source, options))
                    for (position, facts), source in zip(
                        traced.inputs.items(), sources, strict=True
                    )
                }
                parameters = parameters_behind(sources)
                pipelines[traced] = pipeline_of(parameters, inputs, options, traced.metadata)
            rewritten = copied(graph_module)
            pipelines[traced].rewrite(rewritten, is_backward, shows_passes)
            captured = CapturedGraph(rewritten, list(pipelines).index(traced))
            (graphs.backward if is_backward else graphs.forward).append(captured)
        return graphs


def trace(model: nn.Module, call: Mapping[str, Any], tell: Tell = say_nothing) -> Trace:
    """Traces ``model(**call)`` and its backward without computing anything.

    Args:
        model: a model sharded over :func:`fake_ranks`, on the meta device. Its buffers and its
            parameters that are not sharded get memory on the CPU.
        call: keyword arguments of the call; tensors on the CPU, whose values do not matter.
        tell: called with the name of each stage as it begins.

    Raises:
        Zero3Error: no graph was compiled, or code outside the graphs reads parameters.
    """
    parameters = all_parameters_of(model, "plan")
    _materialize(model)
    partitioned: list[tuple[Pipeline, fx.GraphModule, bool]] = []

    def note(pipeline: Pipeline, gm: fx.GraphModule, _: Any, **settings: Any) -> Callable:
        noted = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        partitioned.append((pipeline, noted, bool(settings.get("is_backward"))))
        outputs: Any = gm.graph.output_node().args[0]
        results = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
        return compiler.make_boxed_func(lambda *_: list(map(zeros_like, results)))

    def backend(gm: fx.GraphModule, example_inputs: Any) -> CompiledGraph:
        tell(f"tracing forward and backward: {len(gm.graph.nodes):,} operations")
        return CompiledGraph(gm, example_inputs, Options(regions=False), note)

    try:
        tell("tracing the model")
        with dynamo_runs.graph_breaks() as breaks, without_a_trace(model, parameters):
            dynamo_runs.call_compiled_apart(model, backend, (), dict(call))
    except Zero3Error as error:
        if not breaks:
            raise
        raise Zero3Error(
            "this model cannot be planned: code that is not compiled reads its parameters, which "
            "have no data here. A break inside of a loop leaves the whole function uncompiled; "
            f"{line_of_break(breaks[0])}"
        ) from error
    check_compiled(partitioned)
    return Trace(by_fqn(parameters), tuple(breaks), partitioned)


def check_compiled(graphs: Sequence[Any]) -> None:
    """Raises Zero3Error if a call has compiled no graph."""
    if not graphs:
        raise Zero3Error("no graph was compiled: is torch.compile disabled, or the whole call?")


def _materialize(model: nn.Module) -> None:
    """Gives memory to buffers, and to parameters that are not sharded, once each."""
    whole: dict[torch.Tensor, nn.Parameter] = {}
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
