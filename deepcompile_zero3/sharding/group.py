"""The parameters of one ``fully_shard`` call, and their life in eager code.

Groups form a tree: the group of the outermost sharded module, and below it the groups of the blocks
that were sharded before it. The parameters of a group are gathered together when the first of them
is read in a forward, and freed when that forward ends. Backward gathers the saved ones again (see
``forward.saved``). Compiled graphs gather by operators, in a :func:`compiled_forward`.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.forward.all_gather import (
    AllGather,
    gather_one,
    republish_if_recomputing,
)
from deepcompile_zero3.sharding.forward.casts import ForwardCasts, tensors_in
from deepcompile_zero3.sharding.forward.read_values import ReadValues, refuse_writes
from deepcompile_zero3.sharding.forward.reads import Reads
from deepcompile_zero3.sharding.forward.saved import SavedTensors
from deepcompile_zero3.sharding.gradients.first_actions import announce_at, nodes_of
from deepcompile_zero3.sharding.layouts.layout import DataParallelRanks
from deepcompile_zero3.sharding.model import ShardedModel
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.transport.connection import Connector


@dataclasses.dataclass
class EagerForward:
    """The state of an outermost forward in eager code, while it runs.

    Attributes:
        saved: the tensors that autograd saves. It watches the groups that the forward has read.
        prefetched: groups that the forward has started to gather.
        modules_run: ids of the modules that have run, for each group inside the outermost one.
        has_grad: whether it began with gradients enabled.
    """

    saved: SavedTensors = dataclasses.field(default_factory=SavedTensors)
    prefetched: "list[ParameterGroup]" = dataclasses.field(default_factory=list)
    modules_run: "dict[ParameterGroup, set[int]]" = dataclasses.field(default_factory=dict)
    has_grad: bool = dataclasses.field(default_factory=torch.is_grad_enabled)


class ParameterGroup:
    """Parameters that are gathered together.

    Attributes:
        parameters: the parameters that the group owns. A tied one belongs to the group of the
            first ``fully_shard`` call that found it.
        casts: casts of a forward's inputs and output.
        connects: what connects parameters, by the ranks that they are sharded over.
        model: the sharded model that the group belongs to.
        depth: number of forwards of the group's module that are running.
        forward_prefetch: groups that an eager forward starts to gather once it has this group.
        backward_prefetch: groups that an eager backward starts to gather once it has this group.
        all_reduce_hook: a function that changes the group's reduced gradients, given as flat
            tensors.
        is_finalized_manually: for the outermost group, whether backwards leave reductions to
            ``finalize_backward``.
    """

    def __init__(
        self,
        parameters: list[ShardedParameter],
        casts: ForwardCasts,
        connects: Mapping[DataParallelRanks, Connector],
        num_modules: int = 1,
    ) -> None:
        self.parameters = parameters
        self.casts = casts
        self.connects = connects
        self._num_modules = num_modules  # number of modules that share the group
        self.model: ShardedModel | None = None
        self.forward_prefetch: list[weakref.ref[ParameterGroup]] = []
        self.backward_prefetch: list[weakref.ref[ParameterGroup]] = []
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.is_finalized_manually = False
        self._parent: weakref.ref[ParameterGroup] | None = None
        self.depth = 0
        self._forward: EagerForward | None = None  # if the running forward began with this group
        self._unshard_called = False  # from unshard() until reshard() or the end of a forward
        self._gathering: AllGather | None = None
        self._values = ReadValues()
        self._children: list[weakref.ref[ParameterGroup]] = []
        self._reads = Reads()
        for parameter in parameters:
            parameter.group = weakref.ref(self)
            parameter.reads = self._reads

    @property
    def parent(self) -> "ParameterGroup | None":
        """The group of the nearest enclosing sharded module."""
        return self._parent() if self._parent is not None else None

    @parent.setter
    def parent(self, group: "ParameterGroup") -> None:
        self._parent = weakref.ref(group)
        group._children.append(weakref.ref(self))

    def ancestry(self) -> Iterator["ParameterGroup"]:
        """Yields this group and those around it, innermost first."""
        group: ParameterGroup | None = self
        while group is not None:
            yield group
            group = group.parent

    def _subtree(self) -> Iterator["ParameterGroup"]:
        """Yields this group and those inside of its modules."""
        yield self
        for child in _alive(self._children):
            yield from child._subtree()

    @property
    def forward(self) -> EagerForward | None:
        """The eager forward that the group's module or an enclosing one is in, if any."""
        forwards = [g._forward for g in self.ancestry() if g._forward is not None]
        return forwards[-1] if forwards else None

    # ---- reads

    def _update_reads(self) -> None:
        """Tells compilers whether a read returns a full tensor, here and in groups below."""
        self._reads.are_whole = self.forward is not None or self._unshard_called
        for group in _alive(self._children):
            group._update_reads()

    @torch_internals.disable_dynamo
    def read(self, parameter: ShardedParameter) -> torch.Tensor:
        """Returns the value of ``module.weight``: the full tensor in a forward, else the DTensor.

        After ``unshard()``, it is the full tensor outside a forward too.
        """
        if torch_internals.is_in_transform():
            with torch_internals.outside_transforms():
                return self._read(parameter)
        return self._read(parameter)

    def _read(self, parameter: ShardedParameter) -> torch.Tensor:
        if _C.handles_signals():
            return parameter.shard  # a handler runs in no forward, even if it interrupts one
        forward = self.forward
        is_trained = parameter.shard.requires_grad
        if forward is not None:
            self._enter(forward)
        elif not self.is_unsharded_by_user:
            if _reads_in_backward_are_whole():
                parameter.refresh()
                republish_if_recomputing([parameter])
                # Its gradient depends on its use, not on where it was read.
                with torch.set_grad_enabled(is_trained):
                    return parameter.value_of(gather_one(parameter))
            return parameter.shard
        value = self._values.get(parameter)
        # Likewise.
        has_grad = torch.is_grad_enabled() or (forward is not None and forward.has_grad)
        differentiable = is_trained and has_grad and not torch.is_inference_mode_enabled()
        if value is None or value.requires_grad != differentiable:
            self._values.forget([parameter])
            if value is None or is_trained:  # else it was frozen after uses that train it
                parameter.prepare_forward()
            self.gather()
            with torch.set_grad_enabled(differentiable):
                value = parameter.value_of(_C.read_gathered(parameter.handle))
            self._values.put(parameter, value)
        return value

    def _enter(self, forward: EagerForward) -> None:
        """Gathers the group for a forward, if this is the first read of it there."""
        self.gather()
        if forward.saved.is_watching(self):
            return
        self._values.forget()  # the contract may have changed since
        resharded = [parameter for parameter in self.parameters if not self._keeps(parameter)]
        forward.saved.watch(self, resharded, _alive(self.backward_prefetch))
        for parameter in self.parameters:
            parameter.prepare_forward()  # also unread ones: other ranks may read them
        _C.note_skipped_gathers([parameter.handle for parameter in self.parameters])
        if not _C.in_backward():
            for group in _alive(self.forward_prefetch):
                group.start_gather()
                forward.prefetched.append(group)

    def _keeps(self, parameter: ShardedParameter) -> bool:
        """Returns whether an eager forward keeps what autograd saves of a parameter for backward.

        Where ``reshard_after_forward`` is None, it keeps the parameters of an outermost module that
        has sharded modules inside, as FSDP2 does: those of a model's last layer, whose backward
        comes first, and embeddings, which no backward reads.
        """
        if parameter.reshard_after_forward is None:
            return self.parent is None and bool(self._children)
        return not parameter.reshard_after_forward

    # ---- gathers

    @property
    def is_unsharded_by_user(self) -> bool:
        """Whether ``unshard()`` has gathered the parameters, or has started to."""
        return self._unshard_called and (
            self._gathering is not None
            or all(parameter.handle.gathered is not None for parameter in self.parameters)
        )

    @torch_internals.disable_dynamo
    def unshard(self, async_op: bool) -> None:
        """Gathers the group until ``reshard``, or the end of the next forward that reads it."""
        if self.forward is None and self.model is not None:
            self.model.begin_forward()
        self.start_gather()
        self._unshard_called = True
        self._reads.are_whole = True
        if not async_op:
            self.gather()
        elif self._gathering is not None:
            self._gathering.snapshot()

    @torch_internals.disable_dynamo
    def reshard(self) -> None:
        """Frees the gathered tensors.

        Raises:
            Zero3Error: a gathered tensor was changed, and the change is lost.
        """
        refuse_writes(self._reshard_parameters(self.parameters))

    def _reshard_parameters(self, parameters: Iterable[ShardedParameter]) -> list[str]:
        """Frees the gathered tensors of ``parameters``, and forgets all that was read.

        Returns the FQNs of those that were changed.
        """
        changed = self._values.take_replaced()
        self._unshard_called = False
        self._reads.are_whole = self.forward is not None
        self._gathering = None
        for group in self.ancestry():
            if group._forward is not None:
                group._forward.saved.unwatch(self)
        changed += [parameter.fqn for parameter in parameters if parameter.reshard()]
        return changed

    def start_gather(self) -> None:
        """Starts to gather the parameters that are not gathered yet."""
        if self._gathering is None:
            missing = [p for p in self.parameters if p.handle.gathered is None]
            if missing:
                republish_if_recomputing(missing)
                self._gathering = AllGather(missing)

    @torch_internals.disable_dynamo
    def gather(self) -> None:
        """Gathers, or waits for a gather that has started, and holds the full tensors for reads."""
        self.start_gather()
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            gathering.start_again_if_lost()
            for parameter, full in gathering.wait().items():
                if parameter.handle.gathered is None:
                    parameter.handle.hold(full)

    # ---- forwards

    @torch_internals.inline_only
    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Forward pre-hook of the group's module."""
        if torch.compiler.is_compiling():
            return self.casts.inputs(args, kwargs)
        return self._begin(args, kwargs)

    @torch_internals.inline_only
    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Forward hook of the group's module. It runs even when the forward raised."""
        if torch.compiler.is_compiling():
            return self.casts.output(output)
        return self._end(module, output)

    @torch_internals.disable_dynamo
    def _begin(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if self.forward is None:
            recomputes = _C.in_backward()
            if not recomputes and self.model is not None:
                self.model.gather_orders.begin_forward()
                self.model.begin_forward()
                self.model.count_forward(self._subtree())
            forward = EagerForward()
            # A checkpoint must save as many tensors when it recomputes, with or without a forward
            # of the model around it: nothing is packed inside of a checkpointed block. An outermost
            # module packs, unless a transform around it refuses hooks.
            packs = not recomputes and not torch_internals.is_checkpointed()
            if (packs or self.parent is None) and torch_internals.may_pack_saved_tensors():
                forward.saved.start()
            self._forward = forward
            self._update_reads()
        self.depth += 1
        return self.casts.inputs(args, kwargs)

    @torch_internals.disable_dynamo
    def _end(self, module: nn.Module, output: Any) -> Any:
        is_last, self.depth = self.depth == 1, max(self.depth - 1, 0)  # 0: it raised before _begin
        if is_last:
            self._leave(module)
        output = self.casts.output(output)
        if is_last and self.forward is None and not torch_internals.is_in_transform():
            one = self.model.parameters[:1] if self.model else ()
            announce_at(nodes_of(tensors_in(output)), one)
        return output

    def _leave(self, module: nn.Module) -> None:
        forward = self.forward
        if forward is not None and forward is not self._forward:
            (run := forward.modules_run.setdefault(self, set())).add(id(module))
            if len(run) < self._num_modules:
                return  # other modules of the group may still read its parameters
            run.clear()
        _reshard_after_forward(self._end_outermost())

    @torch_internals.disable_dynamo
    def abort_forward(self, depth: int = 0) -> None:
        """Ends all but ``depth`` of the module's running forwards; with none left, reshards.

        torch calls no hook after a BaseException that is not an Exception, such as a
        KeyboardInterrupt.
        """
        self.depth = depth
        if depth == 0:
            for group in self._end_outermost():
                group._reshard_parameters(group.parameters)

    def _end_outermost(self) -> list["ParameterGroup"]:
        """Ends the forward that began with this group, if any, and returns the groups to reshard.

        The groups are this one and all that were read, even if their own modules did not run.
        """
        forward, self._forward = self._forward, None
        if forward is None:
            return [self]
        self._update_reads()
        if self.model is not None:
            self.model.gather_orders.end_forward()
        if not torch.is_grad_enabled():
            _C.wait_for_shards()  # no backward will
        groups = dict.fromkeys([self, *forward.saved.stop()])
        for group in forward.prefetched:
            if not group._unshard_called:
                group._gathering = None  # no longer needed
        return list(groups)


@contextlib.contextmanager
def compiled_forward(
    parameters: Sequence[ShardedParameter], is_forward: bool = True
) -> Iterator[None]:
    """Enters and leaves a forward of a compiled graph, which gathers for itself.

    An eager forward around it reshards by itself. Without ``is_forward`` the graph runs inside of
    one, or between ``unshard()`` and ``reshard()``.
    """
    republish_if_recomputing(parameters)
    groups = dict.fromkeys(map(group_of, parameters))  # in one order
    if any(group.forward is not None for group in groups):
        yield
        return
    unsharded = [group for group in groups if group.is_unsharded_by_user]
    for group in unsharded:
        group.gather()
    if not is_forward:
        yield
        return
    for model in filter(None, dict.fromkeys(parameter.model for parameter in parameters)):
        model.begin_forward()
        if not _C.in_backward():
            model.count_forward(group for group in groups if group.model is model)
    try:
        yield
    finally:
        _C.reshard_retained_after_forward([parameter.handle for parameter in parameters])
        _reshard_after_forward(unsharded)


def _reshard_after_forward(groups: Iterable[ParameterGroup]) -> None:
    """Frees the parameters that do not outlive the forward, and those that were written to."""
    written: list[str] = []
    for group in groups:
        handles = ((p, p.handle) for p in group.parameters)
        leaving = [p for p, h in handles if h.was_written() or not h.outlives_forward()]
        written += group._reshard_parameters(leaving)
    refuse_writes(written)


def group_or_none(parameter: ShardedParameter) -> ParameterGroup | None:
    """Returns the group that gathers ``parameter``, or None if its module was deleted."""
    return None if parameter.group is None else parameter.group()


def group_of(parameter: ShardedParameter) -> ParameterGroup:
    """Returns the group that gathers ``parameter``.

    Raises:
        Zero3Error: its module was deleted.
    """
    if (group := group_or_none(parameter)) is None:
        raise Zero3Error(f"the sharded module that '{parameter.fqn}' belongs to was deleted")
    return group


def _alive(groups: list["weakref.ref[ParameterGroup]"]) -> list[ParameterGroup]:
    return [group for reference in groups if (group := reference()) is not None]


def _reads_in_backward_are_whole() -> bool:
    """Returns whether a backward runs, and a read outside of a forward is for its computation.

    A checkpoint may recompute activations without a forward of the module, and a custom backward
    may read parameters that no forward has saved. Hooks see DTensors.
    """
    return _C.in_backward() and (
        torch.is_grad_enabled()
        or torch_internals.is_checkpointed()
        or torch_internals.is_in_custom_backward()
    )
