"""An outermost sharded module, as the runtime and autograd graphs know it."""

import weakref
from collections.abc import Collection, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.gradients.step_versions import count_steps_while_alive
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.source import Source

if TYPE_CHECKING:
    from deepcompile_zero3.sharding.group import ParameterGroup


class Watcher(Protocol):
    """Takes note of a model's forwards, for a feature."""

    def begin_forward(self) -> None:
        """An outermost forward begins on all ranks, or a part of one that a graph computes."""


class ShardedModel:
    """All parameters of an outermost sharded module. They finish a backward together.

    The modules own this object, and so does the autograd graph of each forward: a backward needs no
    module.

    Attributes:
        number: number of the model, the same on all ranks.
        parameters: the parameters, in one order on all ranks.
        nbytes: size in bytes of their full tensors in their compute dtypes.
        is_last_backward: whether the next backward is the last one of a step.
        forwards: how many forwards have computed with each group of parameters since the end of the
            last backward that brought gradients.
        gather_orders: the orders in which forwards and backwards gather.
        watchers: what takes note of forwards.
    """

    def __init__(self, number: int, parameters: Sequence[ShardedParameter]) -> None:
        self.number = number
        self.parameters = tuple(parameters)
        self.is_last_backward = True
        self.forwards: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.gather_orders = _C.GatherOrders()
        self.watchers: list[Watcher] = []
        self.update()
        _models.add(self)
        count_steps_while_alive(self)

    def begin_forward(self) -> None:
        """Tells watchers that a forward, or an ``unshard()``, begins. All shards are up to date."""
        if not self.watchers:
            return
        for parameter in self.parameters:
            parameter.refresh()
        for watcher in self.watchers:
            watcher.begin_forward()

    def count_forward(self, groups: Iterable["ParameterGroup"]) -> None:
        """Notes a forward of ``groups``, unless no backward follows.

        After several, their gradients are not delivered early: each forward may have a backward of
        its own, inside of another one.
        """
        if not torch.is_grad_enabled():
            return
        for group in groups:
            self.forwards[group] = self.forwards.get(group, 0) + 1
            if self.forwards[group] == 2:
                for parameter in group.parameters:
                    parameter.deliver_early_if_possible()

    def update(self) -> None:
        """Recomputes ``nbytes``, positions, presence ids and facts.

        Called when the model is built and after a conversion.
        """
        self.nbytes = sum(parameter.nbytes for parameter in self.parameters)
        first: dict[str, int] = {}  # by process group: index of the model's first parameter there
        for position, parameter in enumerate(self.parameters):
            parameter.position = position
            transport = cast(_C.Transport, parameter.handle.transport)  # parameters are installed
            parameter.handle.announce_as(
                first.setdefault(parameter.shard_group_name, transport.parameter_index)
            )
            parameter.update_facts()

    def retire(self) -> None:
        """Frees the number for another model. This model takes no more steps."""
        for parameter in self.parameters:
            parameter.handle.leave_model()
        _models.discard(self)


_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()


def live_models() -> list[ShardedModel]:
    """Returns all models that are alive."""
    return list(_models)


def live_shards() -> dict[int, ShardedParameter]:
    """Returns the sharded parameters of all live models by the ``id`` of what is registered."""
    return {id(p.registered.latest): p for model in _models for p in model.parameters}


def models_numbered(numbers: Collection[int]) -> list[ShardedModel]:
    """Returns the live models with one of ``numbers``, in the order of their numbers."""
    return sorted((m for m in live_models() if m.number in numbers), key=lambda m: m.number)


def sources_beside(fqns: Set[str]) -> dict[str, Source]:
    """Returns the live sources named in ``fqns`` and all others of their models, by name."""
    by_model = [by_fqn(model.parameters) for model in live_models()]
    found = [named for named in by_model if not fqns.isdisjoint(named)]
    return {fqn: each for named in found for fqn, each in named.items()}


def by_fqn(parameters: Iterable[ShardedParameter]) -> dict[str, Source]:
    """Returns ``parameters``, and the sources in place of some of them, by FQN."""
    result: dict[str, Source] = {}
    for parameter in parameters:
        result[parameter.fqn] = parameter
        result |= {source.fqn: source for source in parameter.sources}
    return result
