"""Parameters that one rank owns, for optimizers that update whole matrices.

The owner's shard is the full parameter. The other ranks' shards have no rows, and these ranks get
no gradient. A loop over the parameters that have gradients, as optimizers have it, therefore
updates each matrix once, on its owner, and communicates nothing.
"""

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.transport.process_groups import neighbours

# Functions whose results are new tensors like a parameter, such as an optimizer's state.
_LIKE = ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
# Functions whose results are copies or views of all of a tensor.
_COPIES = (*_LIKE, "empty_like", "clone", "detach", "to")

_Owned = TypeVar("_Owned", bound="OwnedTensor")


@dataclass(frozen=True)
class Owned:
    """The placement of a parameter that one rank has whole: a result of ``shard_placement_fn``.

    Attributes:
        rank: the owner, counted from 0 among the ranks that parameters are sharded over.
    """

    rank: int


class OwnerMesh(DeviceMesh):
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
        replicas = [whole.get_group(dim) for dim in range(whole.ndim - 1)]
        groups = [*replicas, neighbours(shards, 1)] if owner == shards.rank() else []
        ranks = whole.mesh[..., owner : owner + 1]
        torch_internals.init_mesh(self, whole.device_type, ranks, names, groups)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that one of owns the parameter."""
        return self.whole.get_group(self.whole.ndim - 1)


class OwnedTensor(DTensor):
    """A tensor over an :class:`OwnerMesh`: a gradient, or state that an optimizer keeps.

    Only the owner has it. No other rank knows that it exists, and none can take part in a gather.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func`` as a DTensor would, and makes its result one of these classes.

        torch 2.11 does not call ``__torch_dispatch__`` of a class that derives from DTensor.
        """
        name = getattr(func, "__name__", "")
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            raise Zero3Error(
                "a GradScaler skips a step if a gradient is not finite, and only the owner of a "
                "matrix knows its gradient, so that ranks would skip different steps: compute in "
                "bfloat16, which needs no scaling, or give matrices shards in place of owners"
            )
        with torch_internals.WithoutTorchFunction():
            result = func(*args, **(kwargs or {}))
        if type(result) is not DTensor or not isinstance(result.device_mesh, OwnerMesh):
            return result
        if result.requires_grad:
            return result  # part of a graph
        if name not in _LIKE and any(isinstance(arg, OwnedParameter) for arg in args):
            return owned(result, OwnedParameter)
        return owned(result, OwnedTensor) if name in _COPIES else result

    def __tensor_flatten__(self) -> Any:
        """See DTensor. Dynamo leaves a function that reads such a tensor to Python."""
        torch_internals.refuse_to_be_traced("a tensor that one rank owns")
        return super().__tensor_flatten__()

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Returns the tensor on its owner, and elsewhere one of its shape on the meta device.

        torch copies a full state dict into the local tensors of all ranks.
        """
        if self.device_mesh.get_coordinate() is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Raises a Zero3Error."""
        mesh = cast(OwnerMesh, self.device_mesh)
        raise Zero3Error(
            f"a gradient or optimizer state of shape {list(self.shape)} is on rank {mesh.owner} of "
            f"{mesh.whole} alone, which owns its parameter, and cannot be gathered: use to_local() "
            "there, and save optimizers without full_state_dict (torch.distributed.checkpoint)"
        )

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """Raises a Zero3Error unless this is a parameter, which all ranks know.

        Returns:
            The full parameter, replicated over the mesh of all ranks.
        """
        whole = cast(OwnerMesh, self.device_mesh).whole
        if placements is not None and not all(p.is_replicate() for p in placements):
            raise NotImplementedError(
                f"a tensor that one rank owns cannot be redistributed to {placements}: "
                "distribute_tensor its full_tensor()"
            )
        replicate = [Replicate()] * whole.ndim
        return DTensor.from_local(self.full_tensor(), whole, replicate, run_check=False)


class OwnedParameter(OwnedTensor):
    """A parameter that one rank owns, or a copy of it. All ranks can gather it."""

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Returns the full parameter, on all ranks. Collective, and not differentiable."""
        mesh = cast(OwnerMesh, self.device_mesh)
        local = torch_internals.local_tensor(self).detach()
        if local.is_meta:
            return local.new_empty(self.shape)
        if mesh.get_coordinate() is None:
            full = torch.empty(self.shape, dtype=self.dtype, device=mesh.device_type)
        else:
            full = local.clone(memory_format=torch.contiguous_format)
        dist.broadcast(full, group=mesh.shard_group, group_src=mesh.owner)
        return full


def owned(tensor: DTensor, kind: type[_Owned]) -> _Owned:
    """Returns ``tensor``, which has an :class:`OwnerMesh`, as a tensor of ``kind``."""
    local, spec = torch_internals.local_tensor(tensor), torch_internals.spec_of(tensor)
    return cast(_Owned, torch_internals.with_spec(local, spec, kind))
