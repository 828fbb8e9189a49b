"""Meshes of some of the ranks that parameters are sharded over."""

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor


class MeshOfFew(DeviceMesh):
    """The mesh of a parameter of which only some ranks have rows.

    On the other ranks, torch computes nothing with DTensors over it.

    Attributes:
        tensor_class: the class of the DTensors over the mesh.
    """

    tensor_class: type[DTensor]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of all ranks that the parameter is sharded over."""
        raise NotImplementedError


def adopt(tensor: object) -> None:
    """Gives a DTensor over a :class:`MeshOfFew` the class that belongs to the mesh."""
    if type(tensor) is DTensor:
        # Not isinstance, which is slow here: a mesh's metaclass has Python code for it.
        tensor_class = getattr(type(tensor.device_mesh), "tensor_class", None)
        if tensor_class is not None:
            tensor.__class__ = tensor_class
