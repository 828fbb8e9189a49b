"""``explain``: reports how a sharded model is compiled, before a step is taken."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.backend import zero3
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.capture import capture_graphs
from deepcompile_zero3.graph_inputs import parse_options
from deepcompile_zero3.sharding.group import group_or_none
from deepcompile_zero3.sharding.model import by_fqn
from deepcompile_zero3.sharding.module import groups_in
from deepcompile_zero3.sharding.module_parameters import all_parameters_of
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.tools.planning.machine import Machine, machine_of
from deepcompile_zero3.tools.planning.simulate import Assumptions, simulate
from deepcompile_zero3.tools.report import Report, report_of
from deepcompile_zero3.torch_internals import dynamo_runs


@torch.inference_mode(False)  # the step trains, even if the caller is in inference mode
def explain(
    model: nn.Module,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    machine: Machine | str = "h100",
    **kwargs: Any,
) -> Report:
    """Compiles a call of a sharded model and reports what its graphs gather, keep and reduce.

    The function is collective: it calls the model once, and the call gathers parameters. Nothing
    is trained: no backward runs, and buffers and the state of torch's random number generators are
    restored. Code that the user has compiled, or compiles later, is not affected.

    Args:
        model: a sharded model, compiled or not.
        args: positional arguments of the call. The report holds for a batch of this size.
        options: the options of ``torch.compile(model, backend="zero3", options=...)``.
        machine: the machine that the report's timeline is predicted for, with AdamW's state in
            fp32. Bytes and collectives are the same on every machine.
        kwargs: keyword arguments of the call.

    Returns:
        The :class:`Report` of a step.

    Raises:
        Zero3Error: nothing in ``model`` is sharded, or no graph was compiled.
        TypeError: ``model`` is not a module.
        ValueError: an option or the machine is unknown. Exceptions of the model are passed on.

    Example::

        fully_shard(model)
        print(explain(model, input_ids=text, labels=text))
    """
    machine = machine_of(machine)
    parse_options(options)  # raises here, where no compiler wraps the error
    model = getattr(model, "_orig_mod", model)  # the module of torch.compile(model)
    parameters = all_parameters_of(model, "explain")
    groups = groups_in(model)
    if outside := [each.fqn for each in parameters if group_or_none(each) not in groups]:
        raise Zero3Error(
            f"explain: '{outside[0]}' is gathered by a module around this one: call explain on a "
            "module that fully_shard was called on"
        )
    args, kwargs = torch_internals.tree_map_only(torch.Tensor, _as_normal, (args, kwargs))
    with (
        capture_graphs() as graphs,
        dynamo_runs.graph_breaks() as breaks,
        without_a_trace(model, parameters),
    ):
        backend = functools.partial(zero3, options=options)
        dynamo_runs.call_compiled_apart(model, backend, args, kwargs)
    if not graphs.forward:
        raise Zero3Error(
            "explain has nothing to say: no graph was compiled. Is torch.compile disabled, as by "
            "TORCHDYNAMO_DISABLE=1, or the whole call?"
        )
    step = simulate(graphs, by_fqn(parameters), Assumptions(machine))
    return report_of(model, parameters, graphs, tuple(breaks), step.timeline)


def _as_normal(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that a backward may need, which one made in inference mode is not."""
    return tensor.clone() if tensor.is_inference() else tensor


@contextlib.contextmanager
def without_a_trace(model: nn.Module, parameters: Sequence[ShardedParameter]) -> Iterator[None]:
    """Restores, after the block, buffers and random state, which a compiled forward changes."""
    buffers = [
        (owner, name, buffer, torch_internals.version_of(buffer), buffer.detach().clone())
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    devices = {p.handle.device.index for p in parameters if p.handle.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)), torch.enable_grad():
        try:
            yield
        finally:
            for owner, name, buffer, version, before in buffers:
                setattr(owner, name, buffer)
                if torch_internals.version_of(buffer) != version:
                    with torch.no_grad():
                        buffer.copy_(before)
