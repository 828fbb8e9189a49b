"""How a compiler that traces a read of a parameter knows whether a forward runs.

Dynamo may be tracing a call of a sharded module, which then stands on its stack of calls. Or the
traced frame runs inside of an eager forward, or between ``unshard()`` and ``reshard()``. That is a
state of eager code, on which Dynamo guards: :class:`Reads`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import fx, nn

from deepcompile_zero3.torch_internals import dynamo_trace

# Key in the meta of a graph of Dynamo's: it reads tensors that eager code has gathered.
_NO_FORWARD = "zero3_no_forward"
# Functions whose calls are forwards, and the names of their arguments that are modules.
_FORWARDS: dict[CodeType, str] = {nn.Module._call_impl.__code__: "self"}


@dataclasses.dataclass(eq=False)
class Reads:
    """Whether reads of a group's parameters return full tensors in eager code.

    Attributes:
        are_whole: whether they do: in a forward, and after ``unshard()``.
    """

    are_whole: bool = False


def marks_forward(function: Callable) -> Callable:
    """Declares that a call of ``function`` is a forward of its first argument, a sharded module."""
    _FORWARDS[function.__code__] = function.__code__.co_varnames[0]
    return function


def modules_in_traced_forward() -> Iterator[Any]:
    """Yields the modules whose calls Dynamo is tracing, innermost first."""
    return dynamo_trace.traced_arguments(_FORWARDS)


def mark_no_forward(gm: fx.GraphModule) -> None:
    """Records that a graph of Dynamo's reads parameters outside of the forwards in it."""
    gm.meta[_NO_FORWARD] = True


def is_forward(gm: fx.GraphModule) -> bool:
    """Returns whether a graph of Dynamo's is a forward, which ends an ``unshard()``."""
    return not gm.meta.get(_NO_FORWARD, False)
