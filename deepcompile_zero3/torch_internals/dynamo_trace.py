"""What Dynamo, which is loaded if it traces, traces now."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from torch import fx

from deepcompile_zero3.torch_release import private

_TracingContext: Any = private("torch._guards", "TracingContext")


def is_tracing() -> bool:
    """Returns whether Dynamo traces a frame now, even in its own code (unlike is_compiling)."""
    return _TracingContext.try_get() is not None


def refuse_to_be_traced(what: str) -> None:
    """Makes Dynamo, if it traces now, leave the frame to Python."""
    if is_tracing():
        unsupported = private("torch._dynamo.exc", "Unsupported")  # loaded by now
        raise unsupported(f"{what} cannot be traced", gb_type=what)


def traced_arguments(names: Mapping[CodeType, str]) -> Iterator[Any]:
    """Yields an argument of each call that Dynamo traces now, innermost first.

    Args:
        names: the name of the argument, by the function's code. Other functions' calls are skipped.
    """
    frame = _translator().output.current_tx
    while frame is not None:
        name = names.get(frame.f_code)
        if name in frame.symbolic_locals:
            yield getattr(frame.symbolic_locals[name].realize(), "value", None)
        frame = frame.parent


def guard_on(code: CodeType, local: str, attribute: str) -> None:
    """Makes Dynamo guard on an attribute of a local variable in a call of ``code`` that it traces.

    Checks of guards read the attribute, a bool or a text, even if a property computes it. Shorter
    names are checked before longer ones, until a check has failed: it comes first from then on.
    """
    frame = _translator().output.current_tx
    while frame.f_code is not code:
        frame = frame.parent
    source = frame.symbolic_locals[local].realize().source
    attribute_source = private("torch._dynamo.source", "AttrSource")(source, attribute)
    is_constant = private("torch._dynamo.guards", "GuardBuilder.CONSTANT_MATCH")
    private("torch._dynamo.guards", "install_guard")(attribute_source.make_guard(is_constant))


def when_traced(check: Callable[[Any], None]) -> None:
    """Makes Dynamo call ``check`` with the graph that it traces now, once it is complete.

    An error of ``check`` is raised as that of a backend, which Dynamo tells whole.
    """
    output = _translator().output
    finalizer = _Check(check, output.compiler_fn)
    if finalizer not in output.register_finalizer_fns:
        output.add_graph_finalizer(finalizer)


@dataclasses.dataclass(frozen=True)
class _Check:
    """See :func:`when_traced`."""

    check: Callable[[Any], None]
    backend: Any

    def __call__(self, gm: Any) -> None:
        try:
            self.check(gm)
        except Exception as error:
            failed = private("torch._dynamo.exc", "BackendCompilerFailed")
            raise failed(self.backend, error, None) from error


def traced_graph() -> fx.Graph:
    """Returns the outermost graph that Dynamo traces now, as far as it has come."""
    graph: fx.Graph = _translator().output.root_tracer.graph
    return graph


def is_changed_in_trace(container: object) -> bool:
    """Returns whether code that Dynamo traces now has changed ``container``, an existing object.

    Dynamo makes such a change once the graph has run.
    """
    side_effects = _translator().output.side_effects
    return container in side_effects and side_effects.is_modified(side_effects[container])


def traced_self() -> object:
    """Returns the first argument of the outermost frame that Dynamo traces now, or None."""
    try:
        frame = _translator().output.root_tx
    except AttributeError:  # a backend that is called by itself
        return None
    return frame.f_locals.get(next(iter(frame.f_code.co_varnames), None))


def traced_input(node: Any) -> object:
    """Returns the value that an input of a graph of Dynamo's was traced with, or None."""
    argument = node.meta.get("grapharg")
    return None if argument is None else argument.example


def _translator() -> Any:
    """Returns Dynamo's translator of the frame that it traces now. Dynamo is loaded."""
    return private("torch._dynamo.symbolic_convert", "InstructionTranslator").current_tx()
