"""``detect_nonfinite``: which gradients are not finite, and on which rank they were so first."""

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from deepcompile_zero3.guides import Guide
from deepcompile_zero3.sharding.module_parameters import all_parameters_of, by_mesh
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.transport.json_collectives import all_gather_lines, shorten

_CHECK = "detect_nonfinite"
_REDUCED = "once it was reduced"


@contextlib.contextmanager
def detect_nonfinite(model: nn.Module) -> Iterator[None]:
    """Makes backwards in the block raise if a gradient of ``model`` has a NaN or an infinity.

    Each gradient is checked when it arrives, before it is cast to its ``grad_dtype``, and again
    when it is reduced. The ranks exchange what they found, and all of them raise. The message says
    on which ranks which gradients were not finite, or that only their sum is not. The gradients of
    a rank stand in the order in which they arrived: a backward computes the first one next to the
    cause. The gradients of that backward are dropped. The check costs a pass over the gradients and
    an exchange.

    Args:
        model: a module whose parameters are sharded, or a part of such a model. All ranks enter the
            block.

    Raises:
        Zero3Error: nothing in ``model`` is sharded. Backwards in the block raise it as above.
        TypeError: ``model`` is not a module.
    """
    parameters = all_parameters_of(model, _CHECK)
    new = [parameter for parameter in parameters if _CHECK not in parameter.checks]
    for parameter in new:
        parameter.checks[_CHECK] = _nonfinite_gradients
        parameter.settings = parameter.settings.replace(detects_nonfinite=True)
        parameter.deliver_early_if_possible()
    try:
        yield
    finally:
        for parameter in new:
            parameter.checks.pop(_CHECK, None)
            parameter.settings = parameter.settings.replace(detects_nonfinite=False)
            parameter.deliver_early_if_possible()
            parameter.handle.take_nonfinite()


def _nonfinite_gradients(reduced: Sequence[tuple[ShardedParameter, torch.Tensor]]) -> str:
    """Returns an error message if a gradient that was reduced is not finite on some rank, or "".

    Collective.
    """
    found: dict[ShardedParameter, list[tuple[float, str]]] = {}  # with the number of its arrival
    for parameter, gradient in reduced:
        mine = found.setdefault(parameter, [])
        what = f"rank {dist.get_rank()}: the gradient of '{parameter.fqn}'"
        if nonfinite := parameter.handle.take_nonfinite():
            arrival, *numbers = nonfinite
            mine.append((arrival, _described(f"{what}, before it was reduced,", *numbers)))
        elif not torch.isfinite(gradient).all():
            nans, infinities = int(gradient.isnan().sum()), int(gradient.isinf().sum())
            line = _described(f"{what}, {_REDUCED},", nans, infinities, gradient.numel())
            mine.append((math.inf, line))
    told: list[str] = []
    for groups, members in by_mesh(found).items():
        in_order = sorted(each for member in members for each in found[member])
        told = all_gather_lines(_CHECK, told + [line for _, line in in_order], groups)
    told = all_gather_lines(_CHECK, told, _groups_between_meshes(found))
    # A reduced gradient is not finite because one that arrived was not: causes come first.
    first = sorted(told, key=lambda each: _REDUCED in each)
    if not told:
        return ""
    return (
        f"gradients are not finite. {shorten(first)}; the gradients of this backward were dropped: "
        f"skip the batch, or lower the learning rate or the loss scale. See {Guide.NAN}"
    )


def _groups_between_meshes(parameters: Collection[ShardedParameter]) -> list[dist.ProcessGroup]:
    """Returns the groups of ranks with parts of one parameter on meshes of their own, in one order.

    Ranks of tensor parallelism are such. Those of experts that are all on one mesh with other
    parameters have told each other there.
    """
    models = dict.fromkeys(parameter.model for parameter in parameters)
    layouts = [parameter.layout for model in models if model for parameter in model.parameters]
    meshes = dict.fromkeys(parameter.layout.ranks for parameter in parameters)
    met = [set(ranks.mesh.mesh.flatten().tolist()) for ranks in meshes]
    groups = dict.fromkeys(
        group for layout in layouts if layout.inner for group in layout.inner.mesh.get_all_groups()
    )
    ranks_of = {group: dist.get_process_group_ranks(group) for group in groups}
    return [group for group in groups if not any(each.issuperset(ranks_of[group]) for each in met)]


def _described(what: str, nans: int, infinities: int, numel: int) -> str:
    return f"{what} has {nans} NaN and {infinities} infinite of {numel} elements"
