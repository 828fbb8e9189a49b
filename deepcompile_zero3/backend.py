"""The ``zero3`` backend of ``torch.compile``.

::

    Dynamo's graph --lift--> the single-device model --AOTAutograd, partitioner--> forward, backward
        --insert_gathers, insert_reduces, chain_reductions--> Inductor
"""

import copy
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch import fx

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.lift import (
    declare_grad_dtypes,
    forget_contracts,
    lift_unshards,
    uses_of,
)
from deepcompile_zero3.passes.pipeline import Partitioner, Rewriting
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.group import refuse_writes
from deepcompile_zero3.sharding.parameter import ShardedParameter, find, own_models
from deepcompile_zero3.torch_internals import compiler

# Of a partitioned graph; called with a Rewriting ahead of what Inductor is called with.
GraphCompiler: TypeAlias = Callable[..., Callable]


@dataclass(frozen=True)
class Options:
    """``torch.compile(model, backend="zero3", options={...})``: every option there is.

    Attributes:
        inductor: False runs the rewritten graphs as they are, op by op, for debugging.
        inductor_config: Inductor's own settings for these graphs, as in its ``options``.
        gather_bucket_mb: at most so many MiB (of full parameters) are gathered by one collective,
            a larger parameter alone.
        keep_mb: a model's compiled forwards keep at most so many MiB of full parameters for
            backward, where ``reshard_after_forward`` is None; the others are gathered again.
        fp32_weight_grads: True asks matmuls of bf16 or fp16 for the fp32 that they sum in, where
            all that they compute is a gradient whose ``grad_dtype`` is float32 or None. Eager
            PyTorch rounds it first.
    """

    inductor: bool = True
    inductor_config: Mapping[str, Any] = field(default_factory=dict)
    gather_bucket_mb: float = 64.0
    keep_mb: float = 64.0
    fp32_weight_grads: bool = False

    def __post_init__(self) -> None:
        for name in ("inductor", "fp32_weight_grads"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"option '{name}' is a bool, got {getattr(self, name)!r}")
        if not isinstance(self.inductor_config, Mapping):
            raise ValueError(f"option 'inductor_config' is a dict, got {self.inductor_config!r}")
        if self.inductor_config and not self.inductor:
            raise ValueError("option 'inductor_config' needs 'inductor': True")
        for name, least, what in (
            ("gather_bucket_mb", sys.float_info.min, "a positive number"),
            ("keep_mb", 0, "a number of at least 0, or infinity"),
        ):
            value = getattr(self, name)
            finite = value != float("inf") or name == "keep_mb"
            if type(value) not in (int, float) or not (value >= least and finite):
                raise ValueError(f"option '{name}' is {what}, got {value!r}")

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> "Options":
        """Raises ValueError for an unknown key, and lists the known ones."""
        known = [f.name for f in fields(Options)]
        unknown = sorted(set(options or ()) - set(known))
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(map(repr, unknown))} of backend 'zero3'; "
                f"the options are {', '.join(map(repr, known))}"
            )
        return Options(**(options or {}))


def zero3(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable:
    """Compiles a graph of a sharded model; ``torch.compile`` finds it as ``backend="zero3"``.

    A graph that reads no sharded parameter is compiled as by Inductor alone.

    Args:
        gm: Dynamo's graph, which reads sharded parameters through ``zero3.unshard``.
        example_inputs: its inputs.
        options: see :class:`Options`.
        mode: not supported; use ``options={"inductor_config": ...}``.

    Raises:
        ValueError: an unknown option, or a mode.
    """
    if mode is not None:
        raise ValueError(
            f"backend 'zero3' has no mode {mode!r}; give Inductor's settings as "
            "options={'inductor_config': {...}}"
        )
    return CompiledGraph(gm, example_inputs, Options.parse(options), _compile_with_inductor)


def _compile_with_inductor(
    rewriting: Rewriting, graph_module: fx.GraphModule, example_inputs: Any, **kwargs: Any
) -> Callable:
    rewriting(graph_module, bool(kwargs.get("is_backward")))
    return compiler.compile_fx_inner(graph_module, example_inputs, **kwargs)


class CompiledGraph:
    """A compiled graph, and what must hold of its parameters each time it runs."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        compile_graph: GraphCompiler,
    ) -> None:
        self._eager = copy.deepcopy(gm)
        forget_contracts(self._eager)
        parameters = _sharded_inputs(example_inputs)
        if lift_unshards(gm) and not parameters:
            raise Zero3Error(
                "a graph computes with a sharded parameter, and none of its inputs is the "
                "placeholder of a live one: its model was deleted while it was compiled"
            )
        self._positions = tuple(parameters)
        rewriting = rewriting_of(parameters.values(), _facts(parameters, gm), options)
        self._run = _compile(gm, example_inputs, rewriting, options, compile_graph)

    def __call__(self, *args: Any) -> Any:
        """Runs it, with the shards as they are: of the parameters whose placeholders ``args`` has,
        which may be those of another module than the one it was compiled for, like that one.
        """
        parameters = [_alive(args[position]) for position in self._positions]
        # Where twins are tied, one gets two gradients of a graph that was made for two parameters.
        as_traced = len(set(parameters)) == len(parameters)
        for parameter in parameters:
            as_traced &= parameter.settle()
        if _C.running_backward() != -1:  # recomputes a forward, and nobody knows which
            _C.invalidate([parameter.handle for parameter in parameters])
        groups = dict.fromkeys(parameter.group for parameter in parameters)  # in one order
        if any(group.in_forward for group in groups):  # in eager code, which frees what is held
            return self._forward(args, parameters, as_traced, first=False)
        unsharded = [group for group in groups if group.is_unsharded]
        for group in unsharded:
            group.wait_for_gather()
        try:
            return self._forward(args, parameters, as_traced, first=True)
        finally:
            for parameter in parameters:
                if not parameter.handle.stays_after_forward():
                    parameter.handle.let_go_of_held()
            refuse_writes([fqn for group in unsharded for fqn in group.release_after_forward()])

    def _forward(
        self, args: tuple, parameters: list[ShardedParameter], as_traced: bool, first: bool
    ) -> Any:
        if not as_traced:
            # requires_grad or grad_dtype changed since the guards of this call were checked. What
            # they look at follows now, so the next call compiles; this one is right in eager.
            outputs = self._eager(*args)
            for node in _nodes_of(outputs):
                own_models(node, parameters)
            return outputs
        if not torch.is_grad_enabled():
            return self._run(*args)
        # Where nobody is in forward in eager code, this graph is the whole forward.
        _C.add_uses([p.handle for p in parameters if p.placeholder.requires_grad], first)
        outputs = self._run(*args)
        publications = _C.Publications([parameter.handle for parameter in parameters])

        def expect(_: Any) -> None:
            publications.invalidate_if_republished()

        for node in _nodes_of(outputs):
            own_models(node, parameters)
            node.register_prehook(expect)
        return outputs


def _nodes_of(outputs: Iterable[Any]) -> set[Any]:
    """Of autograd's graph, those that give ``outputs``."""
    tensors = (output for output in outputs if isinstance(output, torch.Tensor))
    return {tensor.grad_fn for tensor in tensors} - {None}


def _alive(placeholder: torch.Tensor) -> ShardedParameter:
    parameter = find(placeholder)
    if parameter is None:
        raise Zero3Error(
            "a compiled graph got no placeholder of a live sharded parameter, but a "
            f"{type(placeholder).__name__} {list(placeholder.shape)} of {placeholder.dtype}: its "
            "model was deleted"
        )
    return parameter


def _sharded_inputs(example_inputs: Sequence[Any]) -> dict[int, ShardedParameter]:
    """The inputs, by position, that are placeholders."""
    result = {}
    for position, value in enumerate(example_inputs):
        parameter = find(value)
        if parameter is not None:
            result[position] = parameter
    return result


def _facts(
    parameters: Mapping[int, ShardedParameter], lifted: fx.GraphModule
) -> dict[int, ParameterFacts]:
    groups: dict[str, int] = {}  # numbered in order of appearance: nothing run-specific in a graph
    inputs = lifted.graph.find_nodes(op="placeholder")
    uses = uses_of(lifted.graph)
    return {
        position: ParameterFacts(
            fqn=parameter.fqn,
            group=groups.setdefault(parameter.handle.group_name, len(groups)),
            shared=parameter.handle.is_shared,
            uses=uses[inputs[position]][0],
            only_embeds=uses[inputs[position]][1],
            dim=parameter.placeholder.dim(),
            nbytes=parameter.nbytes,
            reshard_after_forward=parameter.reshard_after_forward,
            is_trained=parameter.placeholder.requires_grad,
            grad_dtype=parameter.handle.grad_dtype,
            reduce_dtype=parameter.handle.reduce_dtype,
            declares_grad_dtype=(
                parameter.declares_grad_dtype and parameter.placeholder.requires_grad
            ),
        )
        for position, parameter in parameters.items()
    }


def rewriting_of(
    parameters: Collection[ShardedParameter], inputs: Mapping[int, ParameterFacts], options: Options
) -> Rewriting:
    """What rewrites a graph of ``parameters``, of which ``inputs`` tells, by position."""
    bucket_bytes = int(options.gather_bucket_mb * 2**20)
    keep_bytes = _keep_bytes(parameters, options)
    return Rewriting(inputs, bucket_bytes, keep_bytes, options.fp32_weight_grads)


def _keep_bytes(parameters: Collection[ShardedParameter], options: Options) -> float:
    """A graph's part of what the forwards of its models may keep by choice: that which it has of
    the bytes of their parameters.
    """
    models = {parameter.model for parameter in parameters} - {None}
    whole = sum(model.nbytes for model in models if model is not None)
    mine = sum(parameter.nbytes for parameter in parameters)
    return options.keep_mb * 2**20 * mine / whole if mine else 0.0


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    rewriting: Rewriting,
    options: Options,
    compile_graph: GraphCompiler,
) -> Callable:
    inputs = rewriting.inputs
    declare_grad_dtypes(gm, inputs)
    with compiler.without_autograd_cache():
        if options.inductor:
            config = dict(options.inductor_config)
            if inputs:
                config["custom_partitioner_fn"] = Partitioner(
                    inputs,
                    config.get("custom_partitioner_fn", compiler.custom_partitioner()),
                )
            if any(facts.dim == 4 for facts in inputs.values()):
                # It reorders the 4-D ancestors of a convolution, and would read a placeholder.
                config["layout_optimization"] = False
            return compiler.compile_fx(
                gm,
                example_inputs,
                inner_compile=functools.partial(compile_graph, rewriting),
                config_patches=config or None,
            )

        def interpret(is_backward: bool) -> Callable:
            def rewritten(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable:
                rewriting(graph_module, is_backward)
                return compiler.make_boxed_func(graph_module.forward)

            return rewritten

        return compiler.aot_autograd(
            fw_compiler=interpret(False),
            bw_compiler=interpret(True),
            partition_fn=Partitioner(inputs),
        )(gm, example_inputs)
