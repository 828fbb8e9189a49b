"""The parameters of one ``fully_shard`` call, and their life in eager code.

Groups form a tree: the group of the outermost sharded module, and below it the groups of the blocks
that were sharded before it. The parameters of a group are gathered together when the first of them
is read in a forward, and freed when that forward ends. Backward gathers again what autograd saves
of them (see ``saved``). Compiled graphs gather for themselves: nothing here runs in them.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.all_gather import AllGather
from deepcompile_zero3.sharding.layout import DataParallel
from deepcompile_zero3.sharding.model import ShardedModel
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.saved import SavedTensors
from deepcompile_zero3.transport.connection import Connection

# Connects parameters, as they are computed with, by descriptions that are the same on all ranks.
Connect: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[str]], list[Connection]]


class ParameterGroup:
    """Parameters that are gathered together.

    Attributes:
        parameters: the parameters that the group owns. A tied one belongs to the group that met it
            first.
        connect: for the ranks that parameters are sharded over, ``transport.connection.connect``
            with these ranks and the group's choices.
        model: the sharded model that the group belongs to.
        depth: number of forwards of the group's module that are running.
        forward_prefetch: groups that an eager forward starts to gather once it has this group.
        backward_prefetch: groups that an eager backward starts to gather once it has this group.
        all_reduce_hook: a function of the group's reduced gradients, flat, which it changes.
        is_finalized_manually: for the outermost group, whether backwards leave reductions to
            ``finalize_backward``.
    """

    def __init__(
        self,
        parameters: list[ShardedParameter],
        mp_policy: MixedPrecisionPolicy,
        connect: Mapping[DataParallel, Connect],
        modules: int = 1,
    ) -> None:
        self.parameters = parameters
        self._input_dtype = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
        self._output_dtype = mp_policy.output_dtype
        self.connect = connect
        self._modules = modules  # number of modules that have this group
        self.model: ShardedModel | None = None
        self.forward_prefetch: list[weakref.ref[ParameterGroup]] = []
        self.backward_prefetch: list[weakref.ref[ParameterGroup]] = []
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.is_finalized_manually = False
        self._parent: weakref.ref[ParameterGroup] | None = None
        self.depth = 0
        self._unsharded = False  # from unshard() until reshard() or the end of a forward
        self._gathering: AllGather | None = None
        self._reads: dict[ShardedParameter, torch.Tensor] = {}
        self._saved: SavedTensors | None = None  # of the running outermost forward
        self._prefetched: list[ParameterGroup] = []  # in that forward
        self._have_run: dict[ParameterGroup, set[int]] = {}  # ids of modules that ran in it
        for parameter in parameters:
            parameter.group = weakref.ref(self)

    @property
    def parent(self) -> "ParameterGroup | None":
        """The group of the nearest enclosing sharded module."""
        return self._parent() if self._parent is not None else None

    @parent.setter
    def parent(self, group: "ParameterGroup") -> None:
        self._parent = weakref.ref(group)

    def ancestry(self) -> Iterator["ParameterGroup"]:
        """Yields this group and those around it, innermost first."""
        group: ParameterGroup | None = self
        while group is not None:
            yield group
            group = group.parent

    @property
    def in_forward(self) -> bool:
        """Whether the group's module or an enclosing one is in an eager forward."""
        return any(group.depth > 0 for group in self.ancestry())

    # ---- reads

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
        running = [group for group in self.ancestry() if group.depth > 0]
        if not running and not self.is_unsharded:
            if _C.running_backward() != -1 and torch.is_grad_enabled():
                # Activations are recomputed; the module itself is not in forward.
                parameter.refresh()
                _C.invalidate([parameter.handle])
                return parameter.read(_C.gather_and_read(parameter.handle))
            return parameter.shard
        saved = running[-1]._saved if running else None
        if saved is not None:
            self.wait_for_gather()
            if saved.watch(self, self.parameters, _alive(self.backward_prefetch)):
                self._reads.clear()  # reads before this forward have an earlier contract
                for each in self.parameters:
                    each.settle()  # also unread ones: other ranks may read them
                _C.note_skipped_gathers([parameter.handle for parameter in self.parameters])
                prefetch = self.forward_prefetch if _C.running_backward() == -1 else []
                for group in _alive(prefetch):
                    group.start_gather()
                    running[-1]._prefetched.append(group)
        value = self._reads.get(parameter)
        differentiable = parameter.placeholder.requires_grad and torch.is_grad_enabled()
        if value is None or value.requires_grad != differentiable:
            parameter.settle()
            self.wait_for_gather()
            value = parameter.read(_C.read_gathered(parameter.handle))
            self._reads[parameter] = value
        return value

    @property
    def is_unsharded(self) -> bool:
        """Whether ``unshard()`` has gathered the parameters, or has started to."""
        return self._unsharded and (
            self._gathering is not None
            or all(parameter.handle.gathered is not None for parameter in self.parameters)
        )

    @torch_internals.disable_dynamo
    def unshard(self, async_op: bool) -> None:
        """Gathers for reads until ``reshard`` or the end of the next forward that reads."""
        self._unsharded = True
        self.start_gather()
        if not async_op:
            self.wait_for_gather()
        elif self._gathering is not None:
            self._gathering.snapshot()

    @torch_internals.disable_dynamo
    def reshard(self) -> None:
        """Frees the gathered tensors.

        Raises:
            Zero3Error: a gathered tensor was written to, and the write is lost.
        """
        refuse_writes(self.release(self.parameters))

    def release(self, parameters: list[ShardedParameter]) -> list[str]:
        """Frees the gathered tensors of ``parameters``.

        Returns the FQNs of those whose tensors were written to.
        """
        self._unsharded = False
        self._gathering = None
        self._reads.clear()
        for group in self.ancestry():
            if group._saved is not None:
                group._saved.forget(self)
        return [parameter.fqn for parameter in parameters if parameter.release()]

    def release_after_forward(self) -> list[str]:
        """Calls ``release`` for the parameters that are not held for the next forward or backward.

        Includes parameters that are held but were written to.
        """
        leaving = [
            p for p in self.parameters if p.handle.was_written() or not p.handle.outlives_forward()
        ]
        return self.release(leaving)

    @torch_internals.disable_dynamo
    def give_up(self) -> None:
        """Frees the gathered tensors, and ends a forward that has not ended."""
        self.depth = 0
        for group in self._end_outermost():
            group.release(group.parameters)

    @torch_internals.disable_dynamo
    def interrupted(self, depth: int) -> None:
        """Ends a forward of the group's module after a BaseException that is no Exception.

        torch calls no hook after such an exception, for example a KeyboardInterrupt. ``depth`` is
        the number of other forwards of the module around the interrupted one.
        """
        if depth > 0:
            self.depth = depth
        else:
            self.give_up()

    def _end_outermost(self) -> list["ParameterGroup"]:
        """Ends what the outermost forward keeps, and returns the groups that were read in it."""
        groups: dict[ParameterGroup, None] = {self: None}
        if self._saved is not None:
            # Also groups whose own modules did not run.
            groups.update(dict.fromkeys(self._saved.stop()))
            self._saved = None
            for group in self._prefetched:
                group._gathering = None  # no longer needed
        self._prefetched.clear()
        self._have_run.clear()
        return list(groups)

    def start_gather(self) -> None:
        """Starts to gather what is not held. A wait, or the end of a forward, ends the gather."""
        if self._gathering is None:
            missing = [p for p in self.parameters if p.handle.gathered is None]
            if missing:
                if _C.running_backward() != -1:  # recomputes a forward; which one is unknown
                    _C.invalidate([p.handle for p in missing])
                self._gathering = AllGather(missing)

    @torch_internals.disable_dynamo
    def wait_for_gather(self) -> None:
        """Waits for the gather, and holds the full tensors for reads."""
        self.start_gather()
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            for parameter, full in zip(gathering.parameters, gathering.wait(), strict=True):
                if parameter.handle.gathered is None:
                    parameter.handle.hold(full)

    # ---- forwards

    @torch_internals.inline_only
    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Forward pre-hook of the group's module."""
        if not torch.compiler.is_compiling():
            self._begin()
        return self.cast_inputs(args, kwargs)

    def cast_inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Casts a forward's arguments as the policy asks."""
        if self._input_dtype is not None:
            args, kwargs = _cast_floats((args, kwargs), self._input_dtype)
        return args, kwargs

    @torch_internals.inline_only
    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Forward hook of the group's module. It runs even when the forward raised."""
        if not torch.compiler.is_compiling():
            self._end(module)
        return self.cast_output(output)

    def cast_output(self, output: Any) -> Any:
        """Casts a forward's output as the policy asks."""
        dtype = self._output_dtype
        return output if dtype is None else _cast_floats(output, dtype)

    @torch_internals.disable_dynamo
    def _begin(self) -> None:
        if not self.in_forward:
            recomputes = _C.running_backward() != -1
            if not recomputes:
                _C.forget_uses(cast(ShardedModel, self.model).number)
            self._saved = SavedTensors()
            # A checkpoint counts the saved tensors, which must be the same when it recomputes.
            # Around a block it gets all of them, whether or not the block is in its model's
            # forward. Around the outermost module it gets none that we pack. A transform has no
            # hooks.
            takes = not recomputes and not torch_internals.is_checkpointed()
            if (takes or self.parent is None) and not torch_internals.is_in_transform():
                self._saved.start()
        self.depth += 1

    @torch_internals.disable_dynamo
    def _end(self, module: nn.Module) -> None:
        if self.depth == 0:
            return  # something raised before _begin
        self.depth -= 1
        if self.depth > 0:
            return
        outermost = next((g for g in self.ancestry() if g._saved is not None), self)
        have_run = outermost._have_run.setdefault(self, set())
        have_run.add(id(module))
        if outermost is not self and len(have_run) < self._modules:
            return  # other modules of the group may read them
        have_run.clear()
        ending = self._end_outermost()
        refuse_writes([fqn for group in ending for fqn in group.release_after_forward()])


def group_of(parameter: ShardedParameter) -> ParameterGroup:
    """Returns the group that gathers ``parameter``.

    Raises:
        Zero3Error: its module was deleted.
    """
    group = None if parameter.group is None else parameter.group()
    if group is None:
        raise Zero3Error(f"the sharded module that '{parameter.fqn}' belongs to was deleted")
    return group


def refuse_writes(fqns: list[str]) -> None:
    """Raises a Zero3Error that names the parameters whose full tensors were written to, if any."""
    if fqns:
        raise Zero3Error(
            f"{', '.join(map(repr, fqns))} was modified in place where it was a gathered copy, "
            "which is freed now: modify the parameter outside of forward, while it is sharded"
        )


def _cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            values = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
            return dataclasses.replace(leaf, **_cast_floats(values, dtype))
        return leaf

    return tree_map(cast, tree)


def _alive(groups: list["weakref.ref[ParameterGroup]"]) -> list[ParameterGroup]:
    return [group for reference in groups if (group := reference()) is not None]
