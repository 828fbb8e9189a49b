"""Parameters that one rank owns, for optimizers that update whole matrices.

The owner's shard is the full parameter, and the other ranks' shards have no rows. Parameter,
gradient and the optimizer's state are DTensors over a mesh of the owner alone. torch computes
nothing with them on the other ranks. An optimizer therefore updates each matrix once, on its owner,
and communicates nothing.
"""

import copy
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.layouts.layout import DataParallelRanks, Layout, MakesLayout
from deepcompile_zero3.sharding.layouts.mesh_of_few import MeshOfFew, adopt
from deepcompile_zero3.sharding.source import kind_of
from deepcompile_zero3.torch_internals import dynamo_trace
from deepcompile_zero3.transport.process_groups import neighbors


@dataclass(frozen=True)
class Owned(MakesLayout):
    """The placement of a parameter that one rank has whole: a result of ``shard_placement_fn``.

    Attributes:
        rank: the owner, counted from 0 among the ranks that parameters are sharded over.
    """

    rank: int

    def layout_of(
        self, fqn: str, parameter: nn.Parameter, ranks: DataParallelRanks, is_on_mesh: bool
    ) -> Layout:
        """See :class:`MakesLayout`."""
        world_size = ranks.shard_group.size()
        if not isinstance(self.rank, numbers.Integral):
            raise TypeError(f"shard_placement_fn gave {self!r} for '{fqn}': its rank is an int")
        if self.rank not in range(world_size):
            raise ValueError(
                f"shard_placement_fn gave {self!r} for '{fqn}', which is sharded over "
                f"{world_size} ranks, counted from 0; if MatrixOwners chose the rank, pass it the "
                "mesh: MatrixOwners(model, mesh)"
            )
        if kind_of(parameter) is not None:
            raise NotImplementedError(
                f"'{fqn}' is a {type(parameter).__name__}, a tensor subclass, and no rank can "
                "own it: shard_placement_fn has to give Shard(0) or None for it"
            )
        if is_on_mesh or isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"'{fqn}' is a DTensor already, and no rank can own it: shard_placement_fn has to "
                "give a Shard or None for it"
            )
        if parameter.numel() == 0 or parameter.dim() == 0:
            return Layout.of(parameter, ranks, None)
        mesh = ranks.meshes_of_few.get(self.rank)
        if mesh is None:
            mesh = ranks.meshes_of_few[self.rank] = OwnerMesh(ranks.mesh, self.rank)
        placements = (Replicate(),) * mesh.ndim
        return Layout(ranks, 0, mesh, placements, None, parameter.shape, self.rank)


# Errors of DTensor, and what they mean for tensors that one rank owns.
_REASONS = {
    "got mixed torch.Tensor and DTensor": "a plain tensor meets a tensor that one rank owns: make "
    "it by zeros_like of that",
    "Cannot cast None to number": "the number of a tensor that one rank owns exists on that rank "
    "alone: take it of full_tensor()",
}


class OwnerMesh(MeshOfFew):
    """The mesh of an owner and its replicas, [1] or [replicate, 1].

    Other ranks are not in it. Operators on its DTensors compute nothing there, as torch defines it.

    Attributes:
        whole: the mesh that other parameters are sharded over.
        owner: the owner's rank in the last dimension of ``whole``.
    """

    def __init__(self, whole: DeviceMesh, owner: int) -> None:
        self.whole = whole
        self.owner = owner
        shards = self.shard_group
        # Meshes of equal ranks and names are equal, and torch takes one for the other.
        names = ("replicas", f"owned in {shards.group_name}")[-whole.ndim :]
        alone = neighbors(shards, 1)  # on all ranks: some backends split a group together
        replicas = [whole.get_group(dim) for dim in range(whole.ndim - 1)]
        groups = [*replicas, alone] if owner == shards.rank() else []
        ranks = whole.mesh[..., owner : owner + 1]
        torch_internals.init_mesh(self, whole.device_type, ranks, names, groups)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of the ranks of which one is the owner."""
        return self.whole.get_group(self.whole.ndim - 1)


class OwnedTensor(DTensor):
    """A DTensor over an OwnerMesh: a parameter that one rank owns, its gradient, or a result
    computed from them.

    It has no ``__slots__`` of its own: ``dcp.async_save`` copies the attributes in DTensor's.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func`` as a DTensor would, and makes its results OwnedTensors.

        torch 2.11 does not call ``__torch_dispatch__`` of a class that derives from DTensor.
        """
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args, **kwargs)
        has_lists = args and name.startswith(("_foreach_", "_fused_"))
        if has_lists and len(places := _places_by_mesh(args[0])) > 1:
            return _on_each_mesh(func, args, kwargs, places)
        try:
            with torch_internals.WithoutTorchFunction():
                result = func(*args, **kwargs)
        except RuntimeError as error:
            reason = next((_REASONS[said] for said in _REASONS if said in str(error)), None)
            if reason is None:
                raise
            raise Zero3Error(
                f"{name}: {reason}; for an optimizer that does this with parameters, gradients or "
                "states, such as Shampoo, call deepcompile_zero3.step_locally(optimizer)"
            ) from error
        for each in result if isinstance(result, list | tuple) else (result,):
            adopt(each)
        if isinstance(result, OwnedTensor) and result.device_mesh.get_coordinate() is None:
            return _on_device(result, name, args, kwargs)
        return result

    def __tensor_flatten__(self) -> Any:
        """See DTensor. Dynamo leaves a function that reads such a tensor to Python."""
        dynamo_trace.refuse_to_be_traced("a tensor that one rank owns")
        return super().__tensor_flatten__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        copied: Any = self.detach().clone()
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        if self.is_leaf:
            grad_dtype.carry_over(self, copied)
            copied.grad = copy.deepcopy(self.grad, memo)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Returns the tensor on its owner, and elsewhere one of its shape on the meta device.

        torch copies a full state dict into the local tensors of all ranks.
        """
        if self.device_mesh.get_coordinate() is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Returns the full tensor, on all ranks. Collective.

        In backward, each rank's gradient of the result counts as the gradient, as for other
        replicated DTensors.
        """
        return cast(torch.Tensor, _FromOwner.apply(self))

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """Returns the full tensor, replicated over the mesh of all ranks. Collective.

        Args:
            device_mesh: that mesh, or the tensor's own: torch passes it for a full state dict.
            placements: ``Replicate()`` for each dimension.
            options: have no effect.

        Raises:
            NotImplementedError: another mesh or placement.
        """
        whole = cast(OwnerMesh, self.device_mesh).whole
        if device_mesh not in (None, whole, self.device_mesh):
            raise NotImplementedError(
                f"a tensor that one rank owns can be redistributed over {whole} only, not "
                f"{device_mesh}: distribute_tensor its full_tensor()"
            )
        if placements is not None and not all(p.is_replicate() for p in placements):
            raise NotImplementedError(
                f"a tensor that one rank owns cannot be redistributed to {placements}: "
                "distribute_tensor its full_tensor()"
            )
        replicate = [Replicate()] * whole.ndim
        return DTensor.from_local(self.full_tensor(), whole, replicate, run_check=False)


OwnerMesh.tensor_class = OwnedTensor


def _on_device(result: OwnedTensor, name: str, args: Any, kwargs: Any) -> OwnedTensor:
    """Returns the ``result`` of function ``name`` on its device, on a rank that is not the owner.

    torch puts it on the CPU.
    """
    like = next((each for each in args if isinstance(each, OwnedTensor)), result)
    accelerator = torch.accelerator.current_accelerator()
    methods = ("cpu", accelerator.type if accelerator else "cpu")
    named = kwargs.get("device") or (name if name in methods else None)
    if name == "to" and named is None:
        named = next((each for each in args if isinstance(each, str | torch.device)), None)
    device = torch.device(named or like.device)
    if result.device.type == device.type or result.requires_grad:
        return result
    local = torch.empty(0, dtype=result.dtype, device=device)
    moved = torch_internals.with_spec(local, torch_internals.spec_of(result))
    adopt(moved)
    return cast(OwnedTensor, moved)


def is_elsewhere(parameter: torch.Tensor) -> bool:
    """Returns whether another rank owns ``parameter``."""
    return isinstance(parameter, OwnedTensor) and parameter.device_mesh.get_coordinate() is None


def rows_of(local: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Returns a local tensor of ``parameter``, its gradient or state with all dimensions.

    torch's local tensors are [0] on ranks that are not in a mesh.
    """
    is_empty = local.shape == (0,) and is_elsewhere(parameter)
    return local.view(0, *parameter.shape[1:]) if is_empty else local


class _FromOwner(torch.autograd.Function):
    """Broadcasts an :class:`OwnedTensor` from its owner."""

    @staticmethod
    def forward(ctx: Any, tensor: OwnedTensor) -> torch.Tensor:
        mesh = cast(OwnerMesh, tensor.device_mesh)
        ctx.spec = torch_internals.spec_of(tensor)
        local = torch_internals.local_tensor(tensor)
        is_mine = mesh.get_coordinate() is not None
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if is_mine:
            full.copy_(local)
        if not full.is_meta:
            dist.broadcast(full, group=mesh.shard_group, group_src=mesh.owner)
        return full

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        is_mine = ctx.spec.mesh.get_coordinate() is not None
        local = gradient if is_mine else gradient.new_empty(0)
        result = torch_internals.with_spec(local, ctx.spec)
        adopt(result)
        return result


def _places_by_mesh(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns the positions of the tensors on each mesh, and of those that are plain."""
    found: dict[DeviceMesh | None, list[int]] = {}
    for position, each in enumerate(tensors):
        mesh = each.device_mesh if isinstance(each, DTensor) else None
        found.setdefault(mesh, []).append(position)
    return [*found.values()]


def _on_each_mesh(
    func: Any, args: Any, kwargs: Any, places: Sequence[Sequence[int]]
) -> list[Any] | None:
    """Runs a function of lists of tensors for those of each mesh by themselves.

    A rank that is not in the mesh of the first would compute nothing with the others either.
    """
    count = len(args[0])
    results: list[Any] | None = None
    for positions in places:
        some = [
            [each[i] for i in positions]
            if isinstance(each, list | tuple) and len(each) == count
            else each
            for each in args
        ]
        if (found := func(*some, **kwargs)) is None:
            continue
        results = results or [None] * count
        for position, result in zip(positions, found, strict=True):
            results[position] = result
    return results


def _unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, scale: torch.Tensor) -> None:
    """Divides gradients by the scale of a GradScaler, and finds out whether all are finite.

    All ranks have the same gradients, as DTensors.
    """
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    owned = [each for each in gradients if isinstance(each, OwnedTensor)]
    others = [each for each in gradients if not isinstance(each, OwnedTensor)]
    mine = [local for each in owned if (local := torch_internals.local_tensor(each)).numel() > 0]
    for some in (others, mine):
        if some:
            unscale(some, found_inf, scale)
    meshes = dict.fromkeys(cast(OwnerMesh, each.device_mesh).whole for each in owned)
    for group in dict.fromkeys(mesh.get_group(mesh.ndim - 1) for mesh in meshes):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group)
