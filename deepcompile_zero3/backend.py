"""The ``zero3`` backend of ``torch.compile``.

::

    Dynamo's graph --lift--> the single-device model --AOTAutograd, partitioner--> forward, backward
        --the passes of ``passes.pipeline``--> Inductor

``pyproject.toml`` registers it, as an entry point of the group ``torch_dynamo_backends``.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import fx, nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.compile_once import cleaning_up, first_alone, graph_key
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.grad_dtype import declare
from deepcompile_zero3.graph.calls import calls_by_region
from deepcompile_zero3.graph.capture import is_capturing
from deepcompile_zero3.graph.log import logs_are_requested
from deepcompile_zero3.graph.recording import (
    is_recording_graphs,
    is_recording_graphs_of,
    run_recorded,
)
from deepcompile_zero3.graph_inputs import describe, parse_options, sharded_inputs
from deepcompile_zero3.options import REFUSED_SETTINGS, Options, refused_setting
from deepcompile_zero3.passes.contract import declare_grad_dtypes, forget_contracts
from deepcompile_zero3.passes.lift import attach, lift_unshards
from deepcompile_zero3.passes.long_lists import read_in_parts
from deepcompile_zero3.passes.partitioner import Partitioner
from deepcompile_zero3.passes.pipeline import Pipeline
from deepcompile_zero3.passes.region_calls import call_again, check_regions_once
from deepcompile_zero3.passes.region_facts import RegionFacts
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.forward.reads import is_forward
from deepcompile_zero3.sharding.gradients.first_actions import announce_at, nodes_of
from deepcompile_zero3.sharding.group import compiled_forward, group_of
from deepcompile_zero3.sharding.model import live_models
from deepcompile_zero3.sharding.module import is_sharded_by_torch
from deepcompile_zero3.sharding.parameter import ShardedParameter, keep_models_alive
from deepcompile_zero3.sharding.source import Source, parameters_behind, source_of
from deepcompile_zero3.torch_internals import compiler, dynamo_trace, stored_graphs
from deepcompile_zero3.torch_internals.kernel_header import precompile_header
from deepcompile_zero3.torch_internals.vector_instructions import known_vector_instructions

# Compiles a partitioned graph. Takes a Pipeline, then the arguments of compile_fx_inner.
GraphCompiler: TypeAlias = Callable[..., Callable]


def zero3(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable:
    """Compiles a graph of a sharded model. ``torch.compile`` finds it as ``backend="zero3"``.

    A graph that reads no sharded parameter is compiled as by Inductor alone.

    Args:
        gm: Dynamo's graph, which reads sharded parameters through ``zero3.unshard``.
        example_inputs: example inputs of ``gm``.
        options: see :class:`Options`.
        mode: name of a set of Inductor's settings, which ``torch._inductor.list_mode_options()``
            lists. ``inductor_config`` has precedence. Modes that capture CUDA graphs, and
            ``"lite"``, are refused.

    Returns:
        A callable that runs the compiled graph.

    Raises:
        ValueError: an option or the mode is unknown, or an option is not valid. From
            ``torch.compile`` this comes as torch's ``BackendCompilerFailed``, when the first graph
            is compiled.
        NotImplementedError: a setting of Inductor is refused, such as CUDA graphs; likewise.
        Zero3Error: the model was deleted while it was compiled.
    """
    parsed = parse_options(options)
    if mode is not None:
        config = {**_settings_of_mode(mode), **parsed.inductor_config}
        parsed = replace(parsed, inductor_config=config)
    return CompiledGraph(gm, example_inputs, parsed, compile_with_inductor)


def _settings_of_mode(mode: str) -> dict[str, Any]:
    """Returns Inductor's settings of a mode."""
    modes = compiler.settings_of_modes()
    refused = {name: refused_setting(settings) for name, settings in modes.items()}
    offered = ", ".join(repr(name) for name, setting in refused.items() if setting is None)
    if mode not in modes:
        raise ValueError(f"unknown mode {mode!r} of backend 'zero3'; the modes are {offered}")
    if (setting := refused[mode]) is not None:
        raise NotImplementedError(
            f"mode {mode!r} sets {setting!r}, but {REFUSED_SETTINGS[setting]}: use one of {offered}"
        )
    return modes[mode]


def compile_with_inductor(
    pipeline: Pipeline, graph_module: fx.GraphModule, example_inputs: Any, **kwargs: Any
) -> Callable:
    """Rewrites a partitioned graph and compiles it. Takes the arguments of ``compile_fx_inner``."""
    is_backward = bool(kwargs.get("is_backward"))
    compiler.forbid_donation()
    lower = pipeline(graph_module, is_backward)
    lower()
    read_in_parts(graph_module)
    if is_backward and pipeline.inputs:  # a pass may have moved what is saved
        example_inputs = _where_they_are(graph_module, example_inputs)
    return compiler.compile_fx_inner(graph_module, example_inputs, **kwargs)


def _where_they_are(gm: fx.GraphModule, example_inputs: Iterable[Any]) -> list[Any]:
    """Returns ``example_inputs`` on the devices where the inputs of the rewritten graph are."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return [
        torch.empty_like(given, device=value.device)
        if isinstance(value, torch.Tensor) and value.device != given.device
        else given
        for value, given in zip(values, example_inputs, strict=True)
    ]


class CompiledGraph:
    """A compiled graph, and the checks of its parameters before each run.

    Attributes:
        num_parameters: number of sharded parameters that the graph reads.
        calls: number of calls of each region in the graph, by its name.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        compile_graph: GraphCompiler,
    ) -> None:
        self._is_forward = is_forward(gm)
        self._eager = copy.deepcopy(gm)
        forget_contracts(self._eager)
        sources = sharded_inputs(example_inputs)
        if not sources:
            _tell_unless_sharded(dynamo_trace.traced_self())
        if lift_unshards(gm) and not sources:
            raise Zero3Error(
                "a graph computes with a sharded parameter, and none of its inputs is the "
                "placeholder of a live one: its model was deleted while it was compiled"
            )
        self._positions = tuple(sources)
        parameters = parameters_behind(sources.values())
        self.num_parameters = len(parameters)
        self._pipeline, regions, self._checks = describe(gm, sources, example_inputs, options)
        self.calls = {name: len(calls) for name, calls in calls_by_region(gm).items()}
        self._bytes_ahead = self._pipeline.options.bytes_ahead
        self._run = _compile(gm, example_inputs, self._pipeline, regions, compile_graph)

    def __call__(self, *args: Any) -> Any:
        """Runs the graph with the shards as they are now.

        The parameters are those whose placeholders are in ``args``. They may belong to another
        module than the one the graph was compiled for, if the two modules are alike.
        """
        sources = [_alive(args[position]) for position in self._positions]
        # The graph was compiled for distinct parameters. If two of them are tied by now, it would
        # bring one parameter two gradients.
        as_traced = len(set(sources)) == len(sources)
        for check in self._checks:
            check(sources)
        parameters = parameters_behind(sources)
        for parameter in parameters:
            as_traced &= parameter.prepare_forward()
            if parameter.substitute is not None:
                parameter.substitute.prepare_graph(parameter.registered.local)
        if not as_traced and any(each.substitute is not None for each in parameters):
            raise Zero3Error(
                "requires_grad or grad_dtype of a parameter changed since this graph was compiled, "
                "or two parameters were tied, and one of its parameters is gathered as other "
                "tensors: run the model again, it compiles anew; tie parameters before fully_shard"
            )
        # Graphs of several models gather nothing ahead.
        if parameters and (model := parameters[0].model) is not None:
            model.gather_orders.bytes_ahead = self._bytes_ahead
        with compiled_forward(parameters, self._is_forward):
            return self._forward(args, sources, parameters, as_traced)

    def _forward(
        self,
        args: tuple,
        sources: list[Source],
        parameters: list[ShardedParameter],
        as_traced: bool,
    ) -> Any:
        if not as_traced:
            # requires_grad or grad_dtype changed after the guards of this call were checked. The
            # values behind the guards are updated now, so the next call recompiles. Or two
            # parameters are tied that were not in the trace. This call runs in eager.
            for group in dict.fromkeys(map(group_of, parameters)):
                for parameter in group.parameters:  # other graphs may read them
                    parameter.prepare_forward()
            outputs = self._eager(*args)
            for node in nodes_of(outputs):
                keep_models_alive(node, parameters)
            announce_at(nodes_of(outputs), parameters)
            return outputs
        has_backward = torch.is_grad_enabled()
        if has_backward and _C.in_backward():  # the forward is recomputed
            _C.exchange_presences([s.parameter.handle for s in sources])
        with _C.RecordedForward() if has_backward else contextlib.nullcontext():
            if is_recording_graphs():
                outputs = run_recorded(self._run, args, self._pipeline.number, sources)
            else:
                outputs = self._run(*args)
        if not has_backward:
            _C.wait_for_shards()  # no backward does so
            return outputs
        epochs = _C.ForwardEpochs([source.handle for source in sources])

        begin_backward = functools.partial(_begin_backward, sources, epochs)
        for node in nodes_of(outputs):
            keep_models_alive(node, parameters)
            node.register_prehook(begin_backward)
        announce_at(nodes_of(outputs), parameters)
        return outputs


def _tell_unless_sharded(module: object) -> None:
    """Warns once of a class whose graph has no sharded parameters, if that is likely a mistake.

    Args:
        module: the module that is compiled; anything else if it is a function.
    """
    why, remedy = None, "Call fully_shard of deepcompile_zero3 first"
    if is_sharded_by_torch(module):
        why = "was sharded by torch's fully_shard, which gathers in hooks"
        remedy = "Import fully_shard from deepcompile_zero3"
    elif (
        isinstance(module, nn.Module)
        and any(parameter.requires_grad for parameter in module.parameters())
        and _has_several_ranks()
        and not live_models()
    ):
        why = "is compiled on several ranks, and no module of this process is sharded"
    if why is not None:
        _warn_once(
            f"zero3: {type(module).__name__} {why}: its graphs are compiled as by Inductor alone. "
            f"{remedy}"
        )


def _has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


@torch_internals.disable_dynamo  # compiled autograd would trace it
def _begin_backward(sources: Sequence[Source], epochs: _C.ForwardEpochs, _: Any) -> None:
    if torch.is_grad_enabled():
        _refuse_create_graph(sources)
    epochs.begin_backward()


def _refuse_create_graph(sources: Iterable[Source]) -> None:
    """Raises Zero3Error if the running backward computes a gradient of one of ``sources``."""
    wanted = (s.fqn for s in sources if torch_internals.backward_reaches(s.placeholder))
    if (fqn := next(wanted, None)) is not None:
        raise Zero3Error(
            f"the gradient of '{fqn}' cannot be differentiated again: "
            "backward(create_graph=True) is not supported"
        )


def _alive(placeholder: torch.Tensor) -> Source:
    source = source_of(placeholder)
    if source is None:
        raise Zero3Error(
            "a compiled graph got no placeholder of a live sharded parameter, but a "
            f"{type(placeholder).__name__} {list(placeholder.shape)} of {placeholder.dtype}: its "
            "model was deleted"
        )
    return source


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    pipeline: Pipeline,
    regions: Mapping[str, RegionFacts],
    compile_graph: GraphCompiler,
) -> Callable:
    options = pipeline.options
    declare_grad_dtypes(gm, pipeline.inputs)
    calls_again = check_regions_once(gm)
    if not options.inductor:
        return _interpreted(gm, example_inputs, pipeline, regions)
    config = dict(options.inductor_config)
    if pipeline.inputs:
        other = compiler.custom_partitioner(config)
        config["custom_partitioner_fn"] = Partitioner(pipeline, regions, other)
        compiler.forbid_cuda_graphs(gm, config)
        config |= compiler.describing_inputs()
        config |= known_vector_instructions(config)
    if any(facts.ndim == 4 for facts in pipeline.inputs.values()):
        # It reorders the 4-D ancestors of a convolution and would read a placeholder.
        config["layout_optimization"] = False
    if any(facts.declares_grad_dtype for facts in pipeline.inputs.values()):
        config |= stored_graphs.may_be_stored(declare, config)
    if not all(facts.is_gathered for facts in pipeline.inputs.values()):
        config |= stored_graphs.may_be_stored(attach, config)
    if calls_again:
        config |= stored_graphs.may_be_stored(call_again, config)
    stored = _stored(gm, example_inputs, pipeline, compile_graph, config)
    with compiler.noting_donations(), stored:
        return compiler.compile_fx(
            gm,
            example_inputs,
            inner_compile=functools.partial(_compile_marked, compile_graph, pipeline),
            config_patches=config or None,
        )


def _compile_marked(compile_graph: GraphCompiler, *args: Any, **kwargs: Any) -> Callable:
    """Compiles a partitioned graph. A backward that is not stored comes here when it first runs."""
    with cleaning_up():
        return compile_graph(*args, **kwargs)


@contextlib.contextmanager
def _stored(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    pipeline: Pipeline,
    compile_graph: GraphCompiler,
    config: Mapping[str, Any],
) -> Iterator[None]:
    """While the block runs, lets Inductor store the compiled graph, or load a stored one.

    If rewritten graphs are captured or logged, or those of its parameters are recorded, nothing is
    stored or loaded: a graph that is loaded is not rewritten.

    Args:
        gm: the graph of Dynamo's.
        example_inputs: its inputs.
        pipeline: what rewrites it.
        compile_graph: what compiles a partitioned graph.
        config: all changes to Inductor's settings, the user's and this library's.
    """
    parameters = parameters_behind(sharded_inputs(example_inputs).values())
    is_shown = is_capturing() or is_recording_graphs_of(parameters) or logs_are_requested()
    is_shown |= compile_graph is not compile_with_inductor
    key = None
    of_user = pipeline.options.inductor_config
    may_be_stored = pipeline.may_be_stored and not is_shown
    if may_be_stored and not stored_graphs.why_not_stored(of_user):
        key = graph_key(gm, example_inputs, pipeline.key, of_user)
    if key is None:
        with stored_graphs.without_autograd_cache():
            yield
        return
    # A rank that waits has not run the forward, so that the first one cannot run its backward.
    with first_alone(key) as compiles, cleaning_up(), compiler.with_eager_backwards():
        if compiles and pipeline.inputs and _is_on_cpu(example_inputs):
            precompile_header(config)
        yield


def _is_on_cpu(values: Iterable[Any]) -> bool:
    return all(value.is_cpu for value in values if isinstance(value, torch.Tensor))


def _interpreted(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    pipeline: Pipeline,
    regions: Mapping[str, RegionFacts],
) -> Callable:
    def interpret(is_backward: bool) -> Callable:
        def rewritten(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable:
            compiler.forbid_donation()
            pipeline(graph_module, is_backward)
            return compiler.make_boxed_func(graph_module.forward)

        return rewritten

    with compiler.noting_donations(), stored_graphs.without_autograd_cache():
        return compiler.aot_autograd(
            fw_compiler=interpret(False),
            bw_compiler=interpret(True),
            partition_fn=Partitioner(pipeline, regions),
            keep_inference_input_mutations=True,  # as Inductor: backward must not read such inputs
        )(gm, example_inputs)
