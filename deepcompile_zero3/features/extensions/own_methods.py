"""FSDP2's all-gather extensions, as the methods of a tensor subclass."""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.extensions.attributes_of_shard import follow
from deepcompile_zero3.features.extensions.inner_tensors import says_what_to_gather
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.setup.blueprint import Blueprint


class OwnMethods:
    """All-gather extensions that a local tensor has itself."""

    needed = "fsdp_pre_all_gather"

    def __init__(self, blueprint: Blueprint) -> None:
        self._module = weakref.ref(blueprint.module)
        self._mesh = blueprint.layout.shard_mesh
        self._mp_policy = blueprint.mp_policy
        self._class: type | None = None
        self._num_arguments = 0  # number of arguments of its fsdp_pre_all_gather
        self._local: Any = None  # the shard, as it was gathered last
        self._in_graphs: Any = None  # what graphs take in place of it

    def takes(self, local: torch.Tensor) -> bool:
        """Returns whether ``local`` has the methods."""
        return says_what_to_gather(local)

    def pre_all_gather(
        self, local: Any, handle: _C.Parameter
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Returns the tensors that are gathered, with as many rows on all ranks, and metadata."""
        if type(local) is not self._class:
            self._class = type(local)
            self._num_arguments = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
        if self._num_arguments == 1:
            inputs, metadata = local.fsdp_pre_all_gather(self._mesh)
        elif self._num_arguments == 5:
            shape, stride = torch.Size(handle.sizes), tuple(handle.strides)
            inputs, metadata = local.fsdp_pre_all_gather(
                self._mesh, shape, stride, self._module(), self._mp_policy
            )
        else:
            raise Zero3Error(
                f"fsdp_pre_all_gather of '{handle.fqn}' takes {self._num_arguments} arguments; "
                "it takes a mesh, or a mesh, the outer size, the outer stride, the module and "
                "the mp_policy"
            )
        self._local = local
        self._in_graphs = follow(self._in_graphs, local)
        chunk_rows = -(-handle.sizes[0] // handle.world_size)
        for each in inputs:
            if torch_internals.is_wrapper(each) or each.dim() == 0:
                raise Zero3Error(
                    f"fsdp_pre_all_gather of '{handle.fqn}' gave a {type(each).__name__} of "
                    f"shape {list(each.shape)}: it gives plain tensors of at least one dimension"
                )
            if each.shape == local.shape and each.shape[0] != chunk_rows:
                raise Zero3Error(
                    f"fsdp_pre_all_gather of '{handle.fqn}' gave {each.shape[0]} rows where "
                    f"other ranks have {chunk_rows}: it pads uneven shards"
                )
        return tuple(inputs), metadata

    def post_all_gather(self, gathered: Sequence[torch.Tensor], metadata: Any) -> torch.Tensor:
        """Returns what the gathered tensors make up: the whole parameter, perhaps with padding."""
        local = self._in_graphs if torch.compiler.is_dynamo_compiling() else self._local
        dtype = self._mp_policy.param_dtype or local.dtype
        full: torch.Tensor
        full, _ = local.fsdp_post_all_gather(tuple(gathered), metadata, dtype)
        return full
