"""Passes over forward and backward graphs, ours and the user's, and their declarations.

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
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import fx

from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.passes.facts import ParameterFacts

Direction: TypeAlias = Literal["forward", "backward"]
# The passes over each graph, in their order. A "lowered" graph is a backward that was shown and now
# goes to Inductor. No pass of the user's runs over it.
Order: TypeAlias = Mapping[Literal["forward", "backward", "lowered"], Sequence["GraphPass"]]

LAST = chain_reductions.__name__

# The invariants that a pass may give up, if it says so.
MAY_CHANGE = ("gather_order", "reduction_order", "gathered_peak", "gradients")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that the options set to a graph.

    Attributes:
        gather_bucket_bytes: maximum size in bytes of the full tensors that one collective gathers.
        keep_bytes: maximum size in bytes of what a forward keeps gathered by choice.
        gathers_ahead: number of gathers that are in flight while a graph computes with another.
    """

    gather_bucket_bytes: int
    keep_bytes: float
    gathers_ahead: int

    @staticmethod
    def of(options: Options, share: float) -> "Limits":
        """Returns the limits of a graph whose parameters have this share of their models' bytes."""
        return Limits(
            gather_bucket_bytes=int(options.gather_bucket_mb * 2**20),
            keep_bytes=options.keep_mb * 2**20 * share if share else 0.0,  # inf * 0 is NaN
            gathers_ahead=options.gathers_ahead,
        )


@dataclass(frozen=True, kw_only=True)
class GraphFacts(Limits):
    """The facts that a pass may use besides the graph. They are the same on all ranks.

    Attributes:
        direction: "forward" or "backward". A forward under ``no_grad`` is one that saves nothing.
        parameters: facts of the sharded parameters of the graph, keyed by FQN. The inputs that
            stand for them have the same in ``node.meta[PARAMETER]``.
        may_keep: FQNs of the parameters that a forward may keep gathered for backward. It keeps
            those whose inputs have ``node.meta[KEEP] = True`` after "choose_kept". Those with
            ``reshard_after_forward=False`` must stay kept. Empty where ranks share memory, which
            gathers nothing twice.
        saved: positions of the results that a forward saves for backward.
        saved_names: names that its backward's inputs have for these, by position.
        gathered: the inputs that the graph gathers, in the order in which it needs them. A pass
            ahead of "insert_gathers" may not add reads of others.
        gradients: the parameters whose gradients a backward computes, by position of the result, in
            the order in which they are reduced.
        placeholders: the inputs of a backward that stand for parameters, by FQN.
        from_forward: values that passes over the forward have returned, by name of the pass.
    """

    direction: Direction
    parameters: Mapping[str, ParameterFacts]
    may_keep: frozenset[str] = frozenset()
    saved: frozenset[int] = frozenset()
    saved_names: Mapping[int, str] = field(default_factory=dict)
    gathered: Mapping[fx.Node, ParameterFacts] = field(default_factory=dict)
    gradients: Mapping[int, ParameterFacts] = field(default_factory=dict)
    placeholders: Mapping[str, fx.Node] = field(default_factory=dict)
    from_forward: Mapping[str, Any] = field(default_factory=dict)


class GraphPass(abc.ABC):
    """A pass over the forward and backward graphs of a model. Subclasses implement ``__call__``.

    The same graph must become the same on every rank: a pass uses nothing but the graph, the facts
    and its own settings, and no rank, clock or random number.

    Attributes:
        graphs: the graphs that it rewrites, by default "forward" and "backward".
        after: name of the pass of this library that it follows (see ``python -m deepcompile_zero3
            passes``), by default the last, "chain_reductions". Passes that follow the same one run
            in the order in which they were given.
        needs: names of passes, of the user's or of this library, that must have run before it.
        changes: the invariants that it gives up, of ``gather_order``, ``reduction_order``,
            ``gathered_peak`` and ``gradients``.
    """

    graphs: Collection[str] = ("forward", "backward")
    after: str = LAST
    needs: Collection[str] = ()
    changes: Collection[str] = ()

    @property
    def name(self) -> str:
        """Name of the pass in messages, by default that of its class. All of a list differ."""
        return type(self).__name__

    @property
    def declared(self) -> tuple:
        """All that the pass says of itself, and its key."""
        names = (sorted(each) for each in (self.graphs, self.needs, self.changes))
        return self.name, self.after, *names, self.uuid()

    def follows(self, name: str, direction: str) -> bool:
        """Whether the pass runs behind the pass ``name`` over the graphs of a direction."""
        return self.after == name and direction in self.graphs

    @abc.abstractmethod
    def __call__(self, gm: fx.GraphModule, facts: GraphFacts) -> Any:
        """Rewrites ``gm`` in place.

        Returns None, or, over a forward, a value for the backward's ``facts.from_forward``.
        """

    def uuid(self) -> Any:
        """Returns a key of all that shapes the result besides the graph, with a stable ``repr``.

        It is a part of the keys of AOTAutograd's cache. None, the default, stores no graph in it.
        """
        return None


class _FunctionPass(GraphPass):
    def __init__(
        self,
        function: Callable[[fx.GraphModule, GraphFacts], Any],
        uuid: Any,
        named: Callable | None = None,
    ) -> None:
        self._named = named or function
        self.__doc__ = self._named.__doc__
        self._function = function
        self._uuid = uuid

    @property
    def name(self) -> str:
        return getattr(self._named, "__name__", type(self._named).__name__)

    def __call__(self, gm: fx.GraphModule, facts: GraphFacts) -> Any:
        return self._function(gm, facts)

    def uuid(self) -> Any:
        return self._uuid


def own_pass(
    named: Callable,
    run: Callable[[fx.GraphModule, GraphFacts], Any],
    *,
    graphs: Collection[str] = (),
    after: Callable | None = None,
    changes: Collection[str] = (),
    uuid: Any,
) -> GraphPass:
    """Makes a pass of this library, with the name and the docstring of a function.

    Args:
        named: the function that does the work.
        run: takes the graph and its facts, and calls ``named`` unless there is nothing to do.
        graphs: the graphs that a feature's pass rewrites: "forward", "backward" or "lowered".
        after: the function of the core's pass that it follows.
        changes: the invariants that it gives up. A pass that gives up "gradient_nodes" returns
            other nodes for gradients, of the same values and kinds.
        uuid: key of all that shapes the result besides graph and facts.
    """
    result = _FunctionPass(run, uuid, named)
    result.graphs, result.changes = graphs, changes
    if after is not None:
        result.after = after.__name__
    return result


def graph_pass(
    *,
    graphs: Collection[Direction] = ("forward", "backward"),
    after: str = LAST,
    needs: Collection[str] = (),
    changes: Collection[str] = (),
    uuid: Any = None,
) -> Callable[[Callable[[fx.GraphModule, GraphFacts], Any]], GraphPass]:
    """Makes a :class:`GraphPass` of a function ``(gm, facts)``, as a decorator.

    The arguments are the attributes of :class:`GraphPass`, and the result of its ``uuid``.
    """

    def decorate(function: Callable[[fx.GraphModule, GraphFacts], Any]) -> GraphPass:
        result = _FunctionPass(function, uuid)
        result.graphs, result.after, result.needs, result.changes = graphs, after, needs, changes
        return result

    return decorate


def check_passes(passes: Sequence[Any], ours: Order) -> None:
    """Raises ValueError if ``passes`` are not distinct passes that can stand among ``ours``."""
    known = names_of(ours)
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
        if any(each.name in names for names in known.values()):
            raise ValueError(f"a pass is named '{each.name}', as one of this library is")
    for each in passes:
        _check_place(each, passes, known)


def _check_names(each: GraphPass) -> None:
    where = f"pass '{each.name}'"
    for what in ("graphs", "needs", "changes"):
        value = getattr(each, what)
        is_names = isinstance(value, list | tuple | set | frozenset)
        if not is_names or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where} has {what}={value!r}: a tuple of names")
    if not each.graphs or set(each.graphs) - {"forward", "backward"}:
        raise ValueError(
            f"{where} has graphs={each.graphs!r}: a tuple of 'forward', 'backward' or both"
        )
    unknown = sorted(set(each.changes) - set(MAY_CHANGE))
    if unknown:
        raise ValueError(
            f"{where} has changes={each.changes!r}: a tuple of {', '.join(map(repr, MAY_CHANGE))}"
        )


def _check_place(
    each: GraphPass, passes: Sequence[GraphPass], known: Mapping[str, Sequence[str]]
) -> None:
    where = f"pass '{each.name}'"
    for direction in each.graphs:
        names = known[direction]
        if each.after not in names:
            raise ValueError(
                f"{where} has after={each.after!r}, which is no pass over the {direction} graph; "
                f"those are {', '.join(map(repr, names))}"
            )
        order = [
            name
            for ours in names
            for name in (ours, *(p.name for p in passes if p.follows(ours, direction)))
        ]
        for need in each.needs:
            if need not in order[: order.index(each.name)]:
                raise ValueError(
                    f"{where} needs {need!r}, which does not run before it over the {direction} "
                    f"graph; the order is {', '.join(order)}"
                )


def without_key(passes: Sequence[GraphPass]) -> list[str]:
    """Returns the names of the passes that let caches store no graph."""
    return [f"pass '{each.name}'" for each in passes if each.uuid() is None]


def names_of(order: Order) -> dict[str, list[str]]:
    """Returns the names of the passes over each graph, in their order."""
    return {graph: [each.name for each in passes] for graph, passes in order.items()}
