"""Finds sharded parameters, and modules that are still to shard; sorts parameters by mesh."""

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.parameter import ShardedParameter


def parameters_of(module: nn.Module) -> dict[str, ShardedParameter]:
    """Returns the sharded parameters that ``module`` itself registers, by attribute name."""
    return module.__dict__.get("_zero3_parameters", {})


def registered_in(model: nn.Module) -> list[ShardedParameter]:
    """Returns the sharded parameters registered anywhere in ``model``, each once."""
    return list(dict.fromkeys(p for m in model.modules() for p in parameters_of(m).values()))


def all_parameters_of(model: nn.Module, caller: str) -> list[ShardedParameter]:
    """Returns the sharded parameters registered anywhere in ``model``, at least one.

    Raises:
        TypeError: ``model`` is not a module.
        Zero3Error: no parameter is sharded. The messages of both errors begin with ``caller``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} takes a module, got {model!r}")
    parameters = registered_in(model)
    if not parameters:
        name = type(model).__name__
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise Zero3Error(
                f"{caller}: the {name} was sharded by something else: import fully_shard from "
                "deepcompile_zero3"
            )
        raise Zero3Error(f"{caller}: no parameter of the {name} is sharded")
    return parameters


def parameters_in(
    optimizer: torch.optim.Optimizer, model: nn.Module, caller: str
) -> list[ShardedParameter]:
    """Returns the sharded parameters of ``model`` that ``optimizer`` has, at least one.

    Raises:
        TypeError: ``model`` is not a module.
        Zero3Error: there is none. The messages of both errors begin with ``caller``.
    """
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [p for p in all_parameters_of(model, caller) if id(p.shard) in given]
    if not found:
        raise Zero3Error(
            f"{caller}: the optimizer has no sharded parameter of the model: build it over "
            "model.parameters() after fully_shard"
        )
    return found


def modules_to_shard(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Returns ``named_modules()``, each once, without those in blocks that are sharded already."""
    result: dict[nn.Module, str] = {}
    sharded: set[nn.Module] = set()
    for name, submodule in itertools.chain(*(module.named_modules() for module in modules)):
        if submodule in sharded:
            continue
        if "_zero3_group" in vars(submodule):  # fully_shard was called on it
            sharded.update(submodule.modules())
        else:
            result.setdefault(submodule, name)
    return [(name, submodule) for submodule, name in result.items()]


def by_mesh(
    parameters: Iterable[ShardedParameter],
) -> dict[tuple[dist.ProcessGroup, ...], list[ShardedParameter]]:
    """Returns ``parameters`` by the groups that they are sharded and replicated over.

    Small meshes come first. The order is the same on all ranks.
    """
    result: dict[tuple[dist.ProcessGroup, ...], list[ShardedParameter]] = {}
    for parameter in sorted(parameters, key=lambda p: (p.layout.ranks.mesh.size(), p.fqn)):
        result.setdefault(parameter.layout.ranks.process_groups, []).append(parameter)
    return result
