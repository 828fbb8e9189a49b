"""``plan``: predicts a step of a large model on ranks that need not exist."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from deepcompile_zero3.options import Options
from deepcompile_zero3.sharding.fully_shard import fully_shard
from deepcompile_zero3.sharding.model import ShardedModel
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.tools.explain import report_of
from deepcompile_zero3.tools.planning.advice import advice_for
from deepcompile_zero3.tools.planning.graphs import fake_ranks, trace
from deepcompile_zero3.tools.planning.machine import Machine, machine_of
from deepcompile_zero3.tools.planning.measure import key_of
from deepcompile_zero3.tools.planning.predicted import Plan, plan_of
from deepcompile_zero3.tools.planning.simulate import SecondsOf, simulate

ShardModel: TypeAlias = Callable[[nn.Module, DeviceMesh], Any]


def plan(
    build: Callable[[], nn.Module],
    call: Mapping[str, Any],
    *,
    world_size: int,
    replicas: int = 1,
    machine: Machine | str = "h100",
    shard: ShardModel | None = None,
    options: Mapping[str, Any] | None = None,
    optimizer_bytes: int = 8,
    prefetch: bool = True,
    advise: bool = True,
    seconds_by_kernel: Mapping[str, float] | None = None,
    tell: Callable[[str], object] = lambda phase: None,
) -> Plan:
    """Predicts a step of ``build()`` on ``world_size`` ranks of a machine.

    The code that trains shards, traces and rewrites the model, and the runtime decides which
    parameters are gathered and reduced together. Nothing is computed or sent, and parameters take
    no memory. Memory, bytes and collectives follow from these decisions. Times come from a model of
    the machine: ``docs/planning.md`` describes the model and its errors. A data-dependent size
    counts as 0, and ``reshard_after_forward=N`` as True.

    Args:
        build: makes the model; called under ``torch.device("meta")``.
        call: keyword arguments of a forward on one rank, which returns a loss first or as
            ``.loss``; tensors on the CPU, whose values do not matter.
        world_size: the number of ranks of all replicas.
        replicas: the number of replicas of the model (hybrid sharding).
        machine: a name in :data:`MACHINES`, or a :class:`Machine`.
        shard: shards the model over a mesh; by default :func:`shard_blocks`.
        options: the options of ``torch.compile(model, backend="zero3", options=...)``.
        optimizer_bytes: bytes of the optimizer's state for each element: 8 for AdamW in fp32.
        prefetch: whether gathers start early. If False, a gather starts when it is waited for.
        advise: whether to try changes that might help, some seconds for a large model.
        seconds_by_kernel: measured seconds by kernel, from :func:`measure_kernels`.
        tell: called with the name of each phase of the plan, which takes minutes for a large model.

    Returns:
        The :class:`Plan` of the rank with the largest shards.

    Raises:
        TypeError: ``build`` does not return a module, or ``call`` is not a mapping.
        ValueError: a machine or option is unknown, or a number of ranks or bytes is wrong.
        Zero3Error: the process has a process group, no graph was compiled, or code outside the
            graphs reads parameters.
    """
    machine = machine_of(machine)
    parsed = Options.parse(options)
    if optimizer_bytes < 0:
        raise ValueError(f"optimizer_bytes is a number of bytes, got {optimizer_bytes}")
    with fake_ranks(world_size, replicas) as mesh:
        tell("building and sharding the model")
        model = sharded(build, call, mesh, shard)
        tell("tracing it")
        traced = trace(model, call)

        def predict(options: Options) -> Plan:
            graphs = traced.rewrite(options)
            step = simulate(
                graphs,
                traced.parameters,
                machine,
                optimizer_bytes=optimizer_bytes,
                prefetch=prefetch,
                seconds_of=told_by(seconds_by_kernel),
            )
            parameters = list(traced.parameters.values())
            report = report_of(model, parameters, graphs, traced.breaks, step.timeline)
            return plan_of(report, machine, world_size, step, _tokens_of(call))

        try:
            tell("taking a step")
            found = predict(parsed)
            if advise:
                tell("taking steps with other options")
                found = replace(found, advice=advice_for(found, parsed, traced, predict))
            return found
        finally:
            retire(traced.parameters.values())


def retire(parameters: Iterable[ShardedParameter]) -> None:
    """Frees the numbers of the models of ``parameters``, which take no more steps."""
    for model in {parameter.model for parameter in parameters} - {None}:
        cast(ShardedModel, model).retire()


def sharded(
    build: Callable[[], nn.Module],
    call: Mapping[str, Any],
    mesh: DeviceMesh,
    shard: ShardModel | None,
) -> nn.Module:
    """Returns a sharded model on the meta device. Raises TypeError if it cannot be called so."""
    if isinstance(build, nn.Module):
        raise TypeError("build is called and makes the model: give its class or a function")
    if not isinstance(call, Mapping):
        raise TypeError(f"call is a dict of keyword arguments, got {type(call).__name__}")
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build makes the model and nothing else, got {type(model).__name__}")
    (shard or shard_blocks)(model, mesh)
    return model


def _tokens_of(call: Mapping[str, Any]) -> int:
    tokens = call.get("input_ids")
    return tokens.numel() if isinstance(tokens, torch.Tensor) else 0


def told_by(seconds: Mapping[str, float] | None) -> SecondsOf:
    """Returns a lookup of the seconds that :func:`measure_kernels` found, if any."""
    return lambda kernel: seconds.get(key_of(kernel)) if seconds else None


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
