"""One sharded parameter: the shard that the optimizer sees, the placeholder that graphs see.

::

    full tensor   [rows, ...]        gathered for a forward or backward, never at rest
    shard         [shard_rows, ...]  a DTensor nn.Parameter, in the layout of torch.chunk
    placeholder   [rows, ...]        full shape, compute dtype and strides; zero bytes of storage

Rows are of the dimension that is sharded, which comes first here whichever it is: see ``layout``.
"""

import contextlib
import weakref
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.layout import Layout
from deepcompile_zero3.transport import agree
from deepcompile_zero3.transport.one_host import SharedMemory
from deepcompile_zero3.transport.process_groups import group_for_reductions

if TYPE_CHECKING:
    from deepcompile_zero3.sharding.group import ParameterGroup

# Set on a placeholder: its parameter, weakly.
_PLACEHOLDER_OF = "_zero3_placeholder_of"
# Set in the metadata of autograd's nodes: the models whose parameters they bring gradients.
_MODELS = "zero3_models"

_REDUCED = "once it was reduced"


class ShardedModel:
    """All parameters of an outermost sharded module: they finish a backward together.

    Its modules own it, and so does the autograd graph of each forward: a backward needs no module.

    Attributes:
        number: the same on all ranks.
        parameters: in one order on all ranks.
        nbytes: of their full tensors, in their compute dtypes.
    """

    def __init__(self, number: int, parameters: Sequence["ShardedParameter"]) -> None:
        self.number = number
        self.parameters = tuple(parameters)
        self.nbytes = sum(parameter.nbytes for parameter in parameters)
        _models.add(self)

    def retire(self) -> None:
        """Frees the number for another model: this one takes no step any more."""
        for parameter in self.parameters:
            parameter.handle.root = 0
        _models.discard(self)


_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()


class ShardedParameter:
    """A parameter of a sharded model, wherever and however often the model registers it.

    Attributes:
        fqn: its name relative to the outermost sharded module, for people.
        layout: where its parts are.
        ranks_meet_in_backward: whether all ranks take part when one gathers again in backward.
        is_read_as_gathered: whether a module reads what the runtime gathers, as it is.
        placeholder: what a traced graph takes in its stead.
        handle: the C++ runtime's view of it.
        reshard_after_forward: True gathers again in backward, False keeps what forward gathered
            until then; None leaves the choice to the compiler, and gathers again in eager.
        graph_key: what graphs depend on beside its contract; parameters that are alike in both and
            in their placeholders may share compiled graphs.
        grad_dtype: that of the shard, when the latest forward began.
        contract: of the leaf, in the words of ``zero3::unshard``.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        module: nn.Module,
        name: str,
        layout: Layout,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None = None,
        shared: SharedMemory | None = None,
        group_after_forward: dist.ProcessGroup | None = None,
    ) -> None:
        self._owner = weakref.ref(module)
        self._group: weakref.ref[ParameterGroup] | None = None
        self._model: weakref.ref[ShardedModel] | None = None
        self._name = name
        self.fqn = ""
        self.layout = layout
        self.is_read_as_gathered = layout.dim == 0 and layout.inner is None  # one guard, not many
        self.reshard_after_forward = reshard_after_forward
        self.grad_dtype: torch.dtype | None = None
        self.contract = ""
        self._shard_of_forward = 0
        self.ranks_meet_in_backward = shared is None or shared.takes_turns

        self.orig_dtype = parameter.dtype
        self._size = parameter.shape
        full = full_like(parameter, layout, mp_policy)
        self.compute_dtype = full.dtype
        ranks = layout.ranks
        self.handle = _C.Parameter()
        self.handle.group_name = ranks.shard_group.group_name
        self.handle.rank = ranks.shard_group.rank()
        self.handle.world_size = ranks.shard_group.size()
        if ranks.replicate_group is not None:
            self.handle.replicate_group_name = ranks.replicate_group.group_name
            self.handle.replica = ranks.replicate_group.rank()
            self.handle.replicas = ranks.replicate_group.size()
        self.handle.divide_factor = ranks.mesh.size()
        self.handle.sizes = list(full.shape)
        self.handle.strides = list(full.stride())
        self.handle.compute_dtype = self.compute_dtype
        self.handle.device = ranks.device
        self.handle.reduce_dtype = mp_policy.reduce_dtype
        self.set_reshard_after_forward(reshard_after_forward, group_after_forward)
        self._shared = shared
        reductions = ranks.shard_group if shared else group_for_reductions(ranks.shard_group)
        self.handle.reduce_group_name = reductions.group_name
        self.placeholder = nn.Parameter(
            _C.make_placeholder(
                self.handle.sizes, self.handle.strides, self.compute_dtype, self.handle.device
            ),
            requires_grad=parameter.requires_grad,
        )
        setattr(self.placeholder, _PLACEHOLDER_OF, weakref.ref(self))
        self.handle.placeholder = self.placeholder
        self._settle_grad_dtype(parameter.grad_dtype)

        shard = nn.Parameter(layout.shard(parameter), requires_grad=parameter.requires_grad)
        shard.__dict__.update(parameter.__dict__)
        grad_dtype.carry_over(parameter, shard)
        if parameter.grad is not None:
            shard.grad = layout.shard(parameter.grad)
        self._built: nn.Parameter | None = shard

    def install(self) -> nn.Parameter:
        """Puts the shard into the module, once all ranks have built theirs, and returns it."""
        shard, self._built = cast(nn.Parameter, self._built), None
        if (shared := self._shared) is not None:
            self.handle.share(shared.one_host, shared.progress, shared.copies)
            self._shared = None
            self._settle_graph_key()
        cast(nn.Module, self._owner())._parameters[self._name] = shard
        self._set_shard(cast(DTensor, shard))
        return shard

    def _set_shard(self, shard: DTensor) -> None:
        self._latest_shard = shard
        self.handle.follow_version(shard)
        self._local = torch_internals.local_tensor(shard)
        self.handle.shard = self.layout.rows(self._local)

    @property
    def group(self) -> "ParameterGroup":
        """The group that gathers the parameter."""
        group = self._group() if self._group is not None else None
        if group is None:
            raise Zero3Error(f"the sharded module that '{self.fqn}' belongs to was deleted")
        return group

    @group.setter
    def group(self, group: "ParameterGroup") -> None:
        self._group = weakref.ref(group)

    @property
    def declares_grad_dtype(self) -> bool:
        """Whether the contract differs from what any compiler does by itself."""
        return self.handle.grad_dtype != self.compute_dtype

    @property
    def shard(self) -> DTensor:
        """The DTensor ``nn.Parameter`` which the model registers now, or did to the last."""
        module = self._owner()
        if module is None:
            return self._latest_shard
        shard = module._parameters[self._name]
        if not isinstance(shard, DTensor):
            raise Zero3Error(
                f"'{self.fqn}' was replaced by a {type(shard).__name__} after fully_shard; "
                "assign a DTensor of the same placement, or copy into it in place"
            )
        return shard

    @property
    def model(self) -> ShardedModel | None:
        """The sharded model that the parameter belongs to, as long as somebody owns that."""
        return self._model() if self._model is not None else None

    def join(self, model: ShardedModel, fqn: str) -> None:
        """Makes the parameter one of ``model``, in which it has this name."""
        self._model = weakref.ref(model)
        self.fqn = self.handle.fqn = fqn
        self.handle.root = model.number
        self.handle.register()
        self._settle_graph_key()

    @property
    def nbytes(self) -> int:
        """Of the full tensor, in its compute dtype."""
        return self.placeholder.numel() * self.placeholder.element_size()

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Changes it, for the runtime too. Forwards shard what they gathered over ``group``, if it
        is given: some of the ranks.
        """
        self.reshard_after_forward = reshard_after_forward
        self.handle.reshard_after_forward = reshard_after_forward is True
        self.handle.after_forward = None
        if group is not None:
            there = self.handle.after_forward = _C.Parameter()
            there.group_name, there.rank, there.world_size = (
                group.group_name,
                group.rank(),
                group.size(),
            )
            for attribute in ("sizes", "strides", "compute_dtype", "device"):
                setattr(there, attribute, getattr(self.handle, attribute))
        self._settle_graph_key()

    def _settle_graph_key(self) -> None:
        handle = self.handle
        self.graph_key = (
            f"reshard_after_forward={self.reshard_after_forward} group={handle.group_name} "
            f"shared={handle.is_shared} reduce_dtype={handle.reduce_dtype} "
            f"model_nbytes={self.model.nbytes if self.model else 0}"  # which limits what is kept
        )

    def read(self, whole: torch.Tensor) -> torch.Tensor:
        """What a module reads, of what was gathered."""
        if whole.grad_fn is not None:
            own_models(whole.grad_fn, [self])
        if self.is_read_as_gathered:
            return whole
        full = self.layout.read(whole)
        if full.requires_grad:  # or uses would be summed before they are cast
            _C.declare_grad_dtype(full, self.handle.grad_dtype)
        return full

    def release(self) -> bool:
        """Lets go of the full tensor, and returns whether somebody has written to it."""
        written = self.handle.was_written()
        self.handle.let_go()
        return written

    def refresh(self) -> DTensor:
        """Makes the runtime read the shard as it is now, and returns it."""
        shard = self.shard
        if not shard.is_leaf:
            raise Zero3Error(
                f"'{self.fqn}' is no leaf now: a sharded model computes with its own parameters, "
                "and functional_call with others that are computed is not supported"
            )
        local = torch_internals.local_tensor(shard)
        if local is not self._local:
            self._check_replacement(shard, local)
            if shard.grad_dtype == shard.dtype != self.grad_dtype:
                shard.grad_dtype = self.grad_dtype  # to_empty() and the like forget it
            self._set_shard(shard)
            self.handle.let_go()
        return shard

    def settle(self) -> bool:
        """Settles what a forward holds to, which its backward will keep.

        Returns whether ``requires_grad`` and ``grad_dtype`` are what graphs were traced with; if
        not, they are now.
        """
        shard = self.refresh()
        if self.handle.is_stale() and self.handle.reshard_after_backward:
            self.handle.let_go()  # which its last backward has not, since it raised
        if self.handle.is_stale():
            raise Zero3Error(
                f"'{self.fqn}' has changed since it was gathered, and set_reshard_after_backward("
                "False) said to compute with that again: set it to True before the last backward "
                "of a step, or call reshard() before the next forward"
            )
        self._shard_of_forward = id(shard)
        as_traced = True
        if self.placeholder.requires_grad != shard.requires_grad:
            self.placeholder.requires_grad_(shard.requires_grad)
            as_traced = False
        if self.grad_dtype != shard.grad_dtype:
            if self.handle.has_accumulated():
                raise Zero3Error(
                    f"grad_dtype of '{self.fqn}' changed from {self.grad_dtype} to "
                    f"{shard.grad_dtype} while it has gradients that are not reduced yet"
                )
            grad_dtype.check(self.fqn, shard)
            self._settle_grad_dtype(shard.grad_dtype)
            as_traced = False
        return as_traced

    def settle_between_forwards(self) -> None:
        """As ``settle``, where perhaps no forward follows: one that has run keeps its shard."""
        if not self._was_replaced(self.refresh()):
            self.settle()

    def _was_replaced(self, shard: DTensor) -> bool:
        return self._shard_of_forward not in (0, id(shard))

    def _settle_grad_dtype(self, declared: torch.dtype | None) -> None:
        self.grad_dtype = declared
        contract = grad_dtype.resolve(declared, self.orig_dtype, self.compute_dtype)
        self.handle.grad_dtype = contract.leaf
        self.handle.shard_grad_dtype = contract.shard
        self.contract = _C.contract_name(contract.leaf)

    def _check_replacement(self, shard: DTensor, local: torch.Tensor) -> None:
        if shard.dtype != self.orig_dtype:
            raise Zero3Error(
                f"'{self.fqn}' was {self.orig_dtype} when it was sharded and is {shard.dtype} now; "
                "convert the model before fully_shard, or compute in another dtype with "
                "MixedPrecisionPolicy(param_dtype=...)"
            )
        mine = list(self._size), self.layout.placements, self.layout.mesh
        found = list(shard.shape), shard.placements, shard.device_mesh
        if found != mine:
            raise Zero3Error(
                "'{}' was sharded as {} by {} over {} and was replaced by {} by {} over {}; keep "
                "shape, placement and mesh".format(self.fqn, *mine, *found)
            )
        if local.device.type not in ("meta", self.handle.device.type):
            raise Zero3Error(
                f"the shard of '{self.fqn}' is on {local.device}, but its mesh computes on "
                f"{self.handle.device}"
            )

    def check_unchanged(self) -> None:
        """Raises if the shard is another one than the forward saw, or has another contract."""
        shard = self.refresh()
        if self._was_replaced(shard):
            raise Zero3Error(
                f"'{self.fqn}' was replaced by another parameter between a forward and its backward"
            )
        if shard.grad_dtype != self.grad_dtype:
            raise Zero3Error(
                f"grad_dtype of '{self.fqn}' was {self.grad_dtype} in forward and is "
                f"{shard.grad_dtype} after its backward: set it before the forward"
            )

    def accumulate_grad(self, reduced: torch.Tensor) -> None:
        """Adds this rank's rows [shard_rows, ...] of a reduced gradient to ``.grad``."""
        shard = self.shard
        if not shard.requires_grad:
            return
        reduced = self.layout.local(reduced)
        if shard.grad is None:
            shard.grad = torch_internals.dtensor_like(reduced.contiguous(), shard)
            return
        local = torch_internals.local_tensor(cast(DTensor, shard.grad))
        if torch.promote_types(local.dtype, reduced.dtype) == local.dtype:
            local.add_(reduced)
        else:
            shard.grad = torch_internals.dtensor_like(local + reduced, shard)


class AllGather:
    """A gather that has started, from the shards as they are now: one collective for each process
    group and dtype among those of ``parameters`` that are not held already.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters = tuple(parameters)
        for parameter in parameters:
            parameter.refresh()
        self._gather = _C.Gather([parameter.handle for parameter in parameters])

    def snapshot(self) -> None:
        """Lets the shards change before ``wait``, which gives what they were."""
        self._gather.snapshot()

    def wait(self) -> list[torch.Tensor]:
        """The full tensors, [rows, ...] each in its compute dtype."""
        return self._gather.finish(fresh=True)


def full_like(
    parameter: torch.Tensor, layout: Layout, mp_policy: MixedPrecisionPolicy
) -> torch.Tensor:
    """``parameter`` as it is computed with, rows first: its dtype, and strides in its order of
    dimensions and without its gaps. On the meta device.
    """
    low = mp_policy.param_dtype if parameter.is_floating_point() else None
    return torch.empty_like(layout.whole(parameter.detach()), dtype=low, device="meta")


def find(placeholder: object) -> ShardedParameter | None:
    """The parameter that this is the placeholder of, if it is one's that is alive."""
    reference = getattr(placeholder, _PLACEHOLDER_OF, None)
    return None if reference is None else reference()


def own_models(node: Any, parameters: Iterable[ShardedParameter]) -> None:
    """Lets a node of autograd's own the models of ``parameters``: a backward needs no module."""
    models = {parameter.model for parameter in parameters}
    node.metadata.setdefault(_MODELS, set()).update(models)


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to, where torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


@torch_internals.disable_dynamo
def _deliver(gradients: Sequence[tuple[_C.Parameter, torch.Tensor]]) -> None:
    """What the runtime calls at the end of a backward, with everything that was reduced in it."""
    # One that is missing was deleted during its own backward.
    delivered = [(p, reduced) for handle, reduced in gradients if (p := find(handle.placeholder))]
    if any(parameter.handle.detects_nonfinite for parameter, _ in delivered):
        _raise_if_nonfinite(delivered)
    for parameter, _ in delivered:
        parameter.check_unchanged()
    for parameter, reduced in delivered:
        parameter.accumulate_grad(reduced)
    for parameter in dict.fromkeys(parameter for parameter, _ in delivered):
        shard = parameter.shard
        for hook in torch_internals.post_accumulate_grad_hooks(shard):
            hook(shard)


def _raise_if_nonfinite(reduced: Sequence[tuple[ShardedParameter, torch.Tensor]]) -> None:
    """Collective, where gradients of parameters that detect it have been reduced."""
    found: dict[tuple[str, str], list[str]] = {}  # by the groups of shards and of replicas
    for parameter, shard in reduced:
        handle = parameter.handle
        if not handle.detects_nonfinite:
            continue
        mine = found.setdefault((handle.group_name, handle.replicate_group_name), [])
        what = f"rank {dist.get_rank()}: that of '{parameter.fqn}'"
        if nonfinite := handle.take_nonfinite():
            mine.append(_described(f"{what}, before it was reduced,", *nonfinite))
        elif not torch.isfinite(shard).all():
            nans, infinities = int(shard.isnan().sum()), int(shard.isinf().sum())
            mine.append(_described(f"{what}, {_REDUCED},", nans, infinities, shard.numel()))
    told: dict[str, None] = {}
    for groups, mine in sorted(found.items()):  # in one order on all ranks
        # Replicas hear what all ranks of a shard group found.
        for group_name in filter(None, groups):
            group = torch_internals.resolve_process_group(group_name)
            mine = [
                each for theirs in agree.gather("detect_nonfinite", mine, group) for each in theirs
            ]
        told.update(dict.fromkeys(mine))
    if told:
        # What was summed of them is not finite either: the cause comes first.
        first = sorted(told, key=lambda each: _REDUCED in each)
        more = f"; and {len(first) - 8} more" if len(first) > 8 else ""
        raise Zero3Error("gradients are not finite. " + "; ".join(first[:8]) + more)


def _described(what: str, nans: int, infinities: int, numel: int) -> str:
    return f"{what} has {nans} NaN and {infinities} infinite of {numel} elements"


@torch_internals.assume_constant_result
def settle(placeholder: torch.Tensor) -> None:
    """Settles a parameter that is being traced: it runs when Dynamo meets it, not in the graph.

    What is wrong with it is for the graph to say when it runs.
    """
    parameter = find(placeholder)
    if parameter is not None:
        with contextlib.suppress(Zero3Error):
            parameter.settle()


@torch_internals.disable_dynamo
def _refresh(placeholder: torch.Tensor) -> None:
    """What the runtime calls before it gathers for an op that met no code of ours on its way."""
    parameter = find(placeholder)
    if parameter is None:
        return
    if _C.running_backward() != -1:  # recomputes a forward, and nobody knows which
        parameter.refresh()
        _C.invalidate([parameter.handle])
        return
    changed = [p.fqn for p in parameter.group.parameters if not p.settle()]
    if changed:
        raise Zero3Error(
            f"requires_grad or grad_dtype of {', '.join(map(repr, changed))} changed since this "
            "graph was compiled; run the model again: it compiles anew"
        )


def parameters_beside(fqns: Set[str]) -> dict[str, ShardedParameter]:
    """Those of these names and the others of their models, by name, as far as they live."""
    models = [m for m in list(_models) if any(p.fqn in fqns for p in m.parameters)]
    return {p.fqn: p for model in models for p in model.parameters}


_C.set_deliver(_deliver)
_C.set_refresh(_refresh)
