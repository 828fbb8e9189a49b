"""Passes of the user's over forward and backward graphs, and what a pass declares.

::

    class MarkMatmuls(GraphPass):
        graphs = ("forward",)

        def __call__(self, gm, facts):
            for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
                node.meta["mine"] = True


    torch.compile(model, backend="zero3", options={"passes": [MarkMatmuls()]})
"""

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import fx

from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.facts import ParameterFacts

Direction: TypeAlias = Literal["forward", "backward"]

# The passes of this library over each graph, in their order. One of the user's follows one of them.
PASSES: Mapping[Direction, tuple[str, ...]] = {
    "forward": (
        "choose_kept",
        "insert_gathers",
        "drop_saved_markers",
        "clone_returned_views",
        "offload_saved",
        "keep_strides_of_regions",
        "chain_reductions",
    ),
    "backward": (
        "drop_needed_in_backward",
        "drop_saved_markers",
        "move_products_out",
        "widen_weight_gradients",
        "insert_reduces",
        "insert_gathers",
        "load_saved",
        "keep_strides_of_regions",
        "chain_reductions",
    ),
}
LAST = "chain_reductions"

# The invariants that a pass may give up, if it says so.
MAY_CHANGE = ("gather_order", "reduction_order", "gathered_peak", "gradients")


@dataclass(frozen=True)
class GraphFacts:
    """What a pass may use besides the graph. It is the same on all ranks.

    Attributes:
        direction: "forward" or "backward".
        parameters: facts of the sharded parameters of the graph, keyed by FQN. The inputs that
            stand for them have the same in ``node.meta[PARAMETER]``.
        may_keep: FQNs of the parameters that a forward may keep gathered for backward. It keeps
            those whose inputs have ``node.meta[KEEP] = True`` behind "choose_kept".
        saved: positions of the results that a forward saves for backward.
        gather_bucket_bytes: maximum size in bytes of the full tensors that one collective gathers.
        keep_bytes: maximum size in bytes of what a forward keeps gathered by choice.
        gathers_ahead: number of gathers that are in flight while a graph computes with another.
    """

    direction: Direction
    parameters: Mapping[str, ParameterFacts]
    may_keep: frozenset[str]
    saved: frozenset[int]
    gather_bucket_bytes: int
    keep_bytes: float
    gathers_ahead: int = 1


class GraphPass(abc.ABC):
    """A pass over the forward and backward graphs of a model. Subclasses implement ``__call__``.

    Every rank must make the same of the same graph: a pass uses nothing but the graph, the facts
    and its own settings, and no rank, clock or random number.

    Attributes:
        graphs: the graphs that it rewrites.
        after: name of the pass of this library that it follows (see ``python -m deepcompile_zero3
            passes``). Passes that follow the same one run in the order in which they were given.
        needs: names of passes, of the user's or of this library, that must have run before it.
        changes: the invariants that it gives up, of ``gather_order``, ``reduction_order``,
            ``gathered_peak`` and ``gradients``.
    """

    graphs: Collection[Direction] = ("forward", "backward")
    after: str = LAST
    needs: Collection[str] = ()
    changes: Collection[str] = ()

    @property
    def name(self) -> str:
        """Name of the pass in messages and lists: by default that of its class."""
        return type(self).__name__

    @property
    def declared(self) -> tuple:
        """All that the pass says of itself, and its key."""
        names = (sorted(each) for each in (self.graphs, self.needs, self.changes))
        return self.name, self.after, *names, self.uuid()

    @abc.abstractmethod
    def __call__(self, gm: fx.GraphModule, facts: GraphFacts) -> None:
        """Rewrites ``gm`` in place."""

    def uuid(self) -> Any:
        """Returns a key of all that shapes the result besides the graph, with a stable ``repr``.

        It is a part of the keys of AOTAutograd's cache. None, the default, stores no graph in it.
        """
        return None


class _FunctionPass(GraphPass):
    def __init__(self, function: Callable[[fx.GraphModule, GraphFacts], None], uuid: Any) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._uuid = uuid

    @property
    def name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    def __call__(self, gm: fx.GraphModule, facts: GraphFacts) -> None:
        return self._function(gm, facts)

    def uuid(self) -> Any:
        return self._uuid


def graph_pass(
    *,
    graphs: Collection[Direction] = ("forward", "backward"),
    after: str = LAST,
    needs: Collection[str] = (),
    changes: Collection[str] = (),
    uuid: Any = None,
) -> Callable[[Callable[[fx.GraphModule, GraphFacts], None]], GraphPass]:
    """Makes a :class:`GraphPass` of a function ``(gm, facts) -> None``, as a decorator.

    The arguments are the attributes of :class:`GraphPass`, and what its ``uuid`` returns.
    """

    def decorate(function: Callable[[fx.GraphModule, GraphFacts], None]) -> GraphPass:
        result = _FunctionPass(function, uuid)
        result.graphs, result.after, result.needs, result.changes = graphs, after, needs, changes
        return result

    return decorate


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Returns the options in ``options``, with passes that stand where they can.

    Raises:
        ValueError: as :meth:`Options.parse` and :func:`check_passes`.
        NotImplementedError: as :meth:`Options.parse`.
    """
    parsed = Options.parse(options)
    check_passes(parsed.passes)
    return parsed


def check_passes(passes: Sequence[Any]) -> None:
    """Raises ValueError if ``passes`` are not distinct passes that stand where they can."""
    for position, each in enumerate(passes):
        if not isinstance(each, GraphPass):
            raise ValueError(
                f"option 'passes' has {each!r} at position {position}: a pass is an instance of a "
                "subclass of GraphPass, or a function that @graph_pass(...) decorates"
            )
    names = [each.name for each in passes]
    for each in passes:
        _check_names(each)
        if names.count(each.name) > 1:
            raise ValueError(
                f"option 'passes' has two passes named '{each.name}': override the property 'name'"
            )
        try:
            key = each.uuid()
        except Exception as error:
            raise ValueError(f"uuid of pass '{each.name}' raised {error!r}") from error
        if callable(key):
            raise ValueError(
                f"uuid of pass '{each.name}' is a key, such as a string, and no function"
            )
        if any(each.name in ours for ours in PASSES.values()):
            raise ValueError(f"a pass is named '{each.name}', as one of this library is")
    for each in passes:
        _check_place(each, passes)


def _check_names(each: GraphPass) -> None:
    where = f"pass '{each.name}'"
    for what in ("graphs", "needs", "changes"):
        value = getattr(each, what)
        is_names = isinstance(value, list | tuple | set | frozenset)
        if not is_names or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where} has {what}={value!r}: a tuple of names")
    if not each.graphs or set(each.graphs) - set(PASSES):
        raise ValueError(
            f"{where} has graphs={each.graphs!r}: a tuple of 'forward', 'backward' or both"
        )
    unknown = sorted(set(each.changes) - set(MAY_CHANGE))
    if unknown:
        raise ValueError(
            f"{where} has changes={each.changes!r}: a tuple of {', '.join(map(repr, MAY_CHANGE))}"
        )


def _check_place(each: GraphPass, passes: Sequence[GraphPass]) -> None:
    where = f"pass '{each.name}'"
    for direction in each.graphs:
        order = order_of(passes, direction)
        if each.after not in PASSES[direction]:
            raise ValueError(
                f"{where} has after={each.after!r}, which is no pass over the {direction} graph; "
                f"those are {', '.join(map(repr, PASSES[direction]))}"
            )
        for need in each.needs:
            if need not in order[: order.index(each.name)]:
                raise ValueError(
                    f"{where} needs {need!r}, which does not run before it over the {direction} "
                    f"graph; the order is {', '.join(order)}"
                )


def without_key(passes: Sequence[GraphPass]) -> list[str]:
    """Returns the names of the passes that let caches store no graph."""
    return [f"pass '{each.name}'" for each in passes if each.uuid() is None]


def order_of(passes: Sequence[GraphPass], direction: Direction) -> list[str]:
    """Returns the names of all passes over a graph, with those of the user's in their places."""
    order = []
    for name in PASSES[direction]:
        order.append(name)
        order += [each.name for each in passes if direction in each.graphs and each.after == name]
    return order
