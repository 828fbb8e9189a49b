"""The ``zero3`` backend of ``torch.compile``.

::

    Dynamo's graph --lift--> the single-device model --AOTAutograd, partitioner--> forward, backward
        --insert_gathers, insert_reduces, chain_reductions--> Inductor
"""

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx

from deepcompile_zero3.capture import captured
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph_log import log_graph, numbers
from deepcompile_zero3.group import refuse_writes
from deepcompile_zero3.parameter import ShardedParameter, find
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.passes.facts import (
    PARAMETER,
    ParameterFacts,
    in_backward_order,
    in_forward_order,
    in_gradient_order,
)
from deepcompile_zero3.passes.gather import insert_gathers, own_outputs
from deepcompile_zero3.passes.keep import choose_kept
from deepcompile_zero3.passes.lift import (
    declare_grad_dtypes,
    forget_contracts,
    lift_unshards,
    name_placeholders,
    uses_of,
)
from deepcompile_zero3.passes.partition import drop_handed_on, drop_needs, settle_backward_gathers
from deepcompile_zero3.passes.reduce import insert_reduces
from deepcompile_zero3.passes.widen import widen_weight_gradients
from deepcompile_zero3.peak import KEPT_OF
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.torch_internals import compiler

_Key = TypeVar("_Key")
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
    rewriting: "Rewriting", graph_module: fx.GraphModule, example_inputs: Any, **kwargs: Any
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
        lift_unshards(gm)
        self._positions = tuple(parameters)
        inputs, keep_bytes = _facts(parameters, gm), keep_bytes_of(parameters.values(), options)
        self._run = _compile(gm, example_inputs, inputs, options, keep_bytes, compile_graph)

    def __call__(self, *args: Any) -> Any:
        """Runs it, with the shards as they are: of the parameters whose placeholders ``args`` has,
        which may be those of another module than the one it was compiled for, like that one.
        """
        parameters = [_alive(args[position]) for position in self._positions]
        as_traced = True
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
            return self._eager(*args)
        if not torch.is_grad_enabled():
            return self._run(*args)
        # Where nobody is in forward in eager code, this graph is the whole forward.
        _C.add_uses([p.handle for p in parameters if p.placeholder.requires_grad], first)
        outputs = self._run(*args)
        publications = _C.Publications([parameter.handle for parameter in parameters])
        models = {parameter.model for parameter in parameters}

        def expect(_: Any, models: Any = models) -> None:  # and own them until then
            publications.invalidate_if_republished()

        for node in {o.grad_fn for o in outputs if isinstance(o, torch.Tensor)}:
            if node is not None:
                node.register_prehook(expect)
        return outputs


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


def keep_bytes_of(parameters: Iterable[ShardedParameter], options: Options) -> float:
    """A graph's part of what the forwards of its models may keep by choice: that which it has of
    the bytes of the parameters that leave it.
    """
    models = {parameter.model for parameter in parameters}
    everywhere = [p for model in models if model is not None for p in model.parameters]
    mine, whole = (
        sum(p.nbytes for p in some if p.reshard_after_forward is None)
        for some in (parameters, everywhere)
    )
    return options.keep_mb * 2**20 * mine / whole if mine else 0.0


class Rewriting:
    """The passes that make forward and backward graphs of one of Dynamo's what they are to be.

    Attributes:
        inputs: what is known of the parameters, by the graph's input.
        keep_bytes: of full tensors, that the forward may keep for backward by choice.
    """

    def __init__(
        self, inputs: Mapping[int, ParameterFacts], options: Options, keep_bytes: float
    ) -> None:
        self.inputs = inputs
        self.keep_bytes = keep_bytes
        self._options = options
        fqns = [facts.fqn for facts in inputs.values()]
        common = os.path.commonprefix(fqns)  # noqa: RUF071 (of characters, up to a dot)
        self._prefix = common.rfind(".") + 1  # of the module that has them all
        self._kept: dict[str, int] = {}
        self._number = 0

    def __call__(self, graph_module: fx.GraphModule, is_backward: bool) -> None:
        """Rewrites a graph; the forward first."""
        _refuse_writes(graph_module, self.inputs)
        if is_backward:
            self._rewrite_backward(graph_module)
        else:
            self._rewrite_forward(graph_module)
        chain_reductions(graph_module)
        if not is_backward:
            self._number = next(numbers)
        captured(graph_module, is_backward, self._number)
        if self.inputs:
            direction, kept = ("backward", {}) if is_backward else ("forward", self._kept)
            log_graph(graph_module, direction, self._number, kept)

    @property
    def _bucket_bytes(self) -> int:
        return int(self._options.gather_bucket_mb * 2**20)

    def _rewrite_forward(self, graph_module: fx.GraphModule) -> None:
        nodes = _sorted(_describe(graph_module, self.inputs)[0], in_forward_order)
        name_placeholders(nodes, self._prefix)
        keep = choose_kept(_sorted(nodes, in_backward_order), self.keep_bytes)
        self._kept.update({nodes[node].fqn: nodes[node].nbytes for node in keep})
        insert_gathers(graph_module, nodes, self._bucket_bytes, keep)
        drop_handed_on(graph_module)
        own_outputs(graph_module, _saved_positions(graph_module.graph.output_node()))

    def _rewrite_backward(self, graph_module: fx.GraphModule) -> None:
        nodes, gradients = _describe(graph_module, self.inputs)
        kept = {node: facts for node, facts in nodes.items() if facts.fqn in self._kept}
        for node, facts in kept.items():
            node.meta[KEPT_OF] = facts.fqn
            del node.meta[PARAMETER]
            del nodes[node]
        inputs = graph_module.graph.find_nodes(op="placeholder")
        handed_on = {node: node.meta[PARAMETER] for node in inputs if PARAMETER in node.meta}
        # Both have what might have been kept and was not.
        known_by = {f.fqn: node for node, f in (*handed_on.items(), *nodes.items())}
        name_placeholders(nodes | handed_on, self._prefix)
        name_placeholders(kept, self._prefix, "_full")
        gathered = drop_needs(graph_module)
        nodes = {n: facts for n, facts in nodes.items() if n in gathered or n.users}
        gradients = _sorted(gradients, in_gradient_order)
        if self._options.fp32_weight_grads:
            widen_weight_gradients(graph_module, gradients)
        insert_reduces(graph_module, gradients, known_by)
        insert_gathers(graph_module, _sorted(nodes, in_backward_order), self._bucket_bytes)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: Mapping[int, ParameterFacts],
    options: Options,
    keep_bytes: float,
    compile_graph: GraphCompiler,
) -> Callable:
    declare_grad_dtypes(gm, inputs)
    rewriting = Rewriting(inputs, options, keep_bytes)
    with compiler.without_autograd_cache():
        if options.inductor:
            config = dict(options.inductor_config)
            if inputs:
                config["custom_partitioner_fn"] = _Partitioner(
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
            partition_fn=_Partitioner(inputs),
        )(gm, example_inputs)


def _sorted(
    facts: Mapping[_Key, ParameterFacts], order: Callable[[ParameterFacts], int]
) -> dict[_Key, ParameterFacts]:
    return dict(sorted(facts.items(), key=lambda item: order(item[1])))


class _Partitioner(compiler.CustomPartitionerFn):  # type: ignore[misc]
    """Inductor's partitioner, or another one of the user's, of a graph that was prepared."""

    def __init__(self, inputs: Mapping[int, ParameterFacts], partitioner: Any = None) -> None:
        self._inputs = inputs
        self._partitioner = partitioner

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        nodes, _ = _describe(gm, self._inputs)
        tangents = [
            node
            for node in gm.graph.find_nodes(op="placeholder")
            if isinstance(node.meta.get("desc"), compiler.TangentAOTInput)
        ]
        settle_backward_gathers(gm, nodes, tangents, kwargs["num_fwd_outputs"])
        partition = self._partitioner or compiler.min_cut_rematerialization_partition
        return partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Of this library's sources, and of the other partitioner: Inductor's cache keys graphs,
        and does not see what an older version of this library had it make of them.
        """
        files = tuple(sorted(map(str, Path(__file__).parent.rglob("*.py"))))
        other = self._partitioner.uuid() if self._partitioner else None
        return compiler.get_hash_for_files(files), other


def _refuse_writes(gm: fx.GraphModule, inputs: Mapping[int, ParameterFacts]) -> None:
    """AOTAutograd writes a mutated input back, in the graph or after it."""
    written = [
        node.args[0].meta.get("desc")
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if isinstance(node.args[0], fx.Node)
    ]
    for description in gm.graph.output_node().meta.get("desc", ()):
        if isinstance(description, compiler.InputMutationAOTOutput):
            written.append(description.mutated_input)
    for description in written:
        facts = _facts_of(description, inputs)
        if facts is not None:
            raise Zero3Error(
                f"'{facts.fqn}' is modified in place inside of a compiled forward, where it is a "
                "temporary copy that is freed: modify the parameter outside of forward"
            )


def _facts_of(description: Any, inputs: Mapping[int, ParameterFacts]) -> ParameterFacts | None:
    if isinstance(description, compiler.PlainAOTInput):
        return inputs.get(description.idx)
    return None


def saved_outputs(graph: fx.Graph) -> set[fx.Node]:
    """The outputs of a forward that its backward sees."""
    output = graph.output_node()
    results: Any = output.args[0]
    return {results[position] for position in _saved_positions(output)}


def _saved_positions(output: fx.Node) -> set[int]:
    """The positions of a forward's outputs that only its backward sees."""
    return {
        position
        for position, description in enumerate(output.meta.get("desc", ()))
        if isinstance(description, compiler.SAVED_OUTPUTS)
    }


def _describe(
    gm: fx.GraphModule, inputs: Mapping[int, ParameterFacts]
) -> tuple[dict[fx.Node, ParameterFacts], dict[int, ParameterFacts]]:
    """Which inputs of a partitioned graph are placeholders, which is noted in their meta, and which
    outputs their gradients.
    """
    nodes = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if (facts := _facts_of(node.meta.get("desc"), inputs)) is not None:
            nodes[node] = node.meta[PARAMETER] = facts
    gradients = {}
    for position, description in enumerate(gm.graph.output_node().meta.get("desc", ())):
        is_gradient = isinstance(description, compiler.GradAOTOutput)
        facts = _facts_of(description.grad_of, inputs) if is_gradient else None
        if facts is not None:
            gradients[position] = facts
    return nodes, gradients
