"""Parameters that are gathered as other tensors: FSDP2's all-gather extensions.

The local tensor of such a parameter is a tensor subclass with two methods. ``fsdp_pre_all_gather``
returns the tensors that are gathered in the parameter's place, the *payloads*, and metadata.
``fsdp_post_all_gather`` makes the full parameter of the gathered payloads. :class:`OwnMethods`
calls them, and :class:`InnerTensors` stands in for them. A payload is a source of the runtime: it
has no gradient. In a compiled graph, the payloads are inputs, and what
``fsdp_post_all_gather`` computes of them is traced.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.extensions.inner_tensors import (
    InnerTensors,
    check_param_dtype,
    chunk_of_rows,
    description_of,
    is_made_of_rows,
    says_what_to_gather,
)
from deepcompile_zero3.features.extensions.own_methods import OwnMethods
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.setup.blueprint import Blueprint
from deepcompile_zero3.sharding.source import (
    Source,
    facts_of_source,
    mark_metadata,
    name_placeholder,
)


class GatheredAsOthers:
    """Tensor subclasses that say what to gather, or are made of rows, as a kind of parameters."""

    def takes(self, local: torch.Tensor) -> bool:
        """Returns whether other tensors are gathered in the place of ``local``."""
        return says_what_to_gather(local) or is_made_of_rows(local)

    def check(self, fqn: str, local: torch.Tensor, requires_grad: bool) -> None:
        """Raises NotImplementedError if ``local`` is trained and does not say what to gather."""
        if requires_grad and is_made_of_rows(local):
            raise NotImplementedError(
                f"'{fqn}' is a {type(local).__name__}, a tensor subclass without "
                "fsdp_pre_all_gather, and is trained: call requires_grad_(False), or pass it in "
                "ignored_params"
            )

    def needs_mesh_names(self, local: torch.Tensor) -> bool:
        """Returns whether ``fsdp_pre_all_gather`` gets the mesh of the shards."""
        return says_what_to_gather(local)

    def described(self, fqn: str, full: nn.Parameter, param_dtype: torch.dtype | None) -> str:
        """Returns a text of the inner tensors, if ``full`` is made of rows."""
        if not is_made_of_rows(full):
            return ""
        check_param_dtype(fqn, full, param_dtype)
        return description_of(full)

    def chunk(
        self, full: torch.Tensor, group: dist.ProcessGroup, device: torch.device
    ) -> torch.Tensor | None:
        """Returns a copy of this rank's rows, if ``full`` is made of rows."""
        return chunk_of_rows(full, group, device) if is_made_of_rows(full) else None

    def substitute(self, parameter: ShardedParameter, blueprint: Blueprint) -> "Extension":
        """Returns the substitute of ``parameter``."""
        return Extension(parameter, blueprint)


class Payload:
    """A tensor that is gathered in place of a parameter, as compiled graphs know parameters.

    Attributes:
        fqn: the parameter's name and the payload's number, for people.
        placeholder: the tensor that a traced graph takes in place of the gathered payload.
        handle: the payload in the C++ runtime.
        facts: all that graphs depend on.
    """

    def __init__(self, parameter: ShardedParameter, number: int, value: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self.fqn = f"{parameter.fqn}.payload_{number}"
        world_size = parameter.handle.world_size
        sizes = [world_size * value.shape[0], *value.shape[1:]]
        like = torch.empty(sizes, dtype=value.dtype, device="meta")
        strides, device = list(like.stride()), parameter.handle.device
        self.placeholder = nn.Parameter(
            _C.make_placeholder(sizes, strides, value.dtype, device), requires_grad=False
        )
        name_placeholder(self.placeholder, self)
        self.compute_dtype = value.dtype
        self.handle = _C.Source(
            sizes=sizes,
            strides=strides,
            dtype=value.dtype,
            device=device,
            rank=parameter.handle.rank,
            layout=_C.RowLayout.chunked(sizes[0], world_size),
            placeholder=self.placeholder,
            transport=parameter.handle.substitute_transport,
            fqn=self.fqn,
        )
        self.handle.register()
        self.facts = facts_of_source(self, parameter.shard_group_name, is_substitute=True)

    @property
    def parameter(self) -> ShardedParameter:
        """The parameter. Raises Zero3Error if its model was deleted."""
        parameter = self._parameter()
        if parameter is None:
            raise Zero3Error(f"the model of '{self.fqn}' was deleted")
        return parameter

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part of the payload."""
        return self.handle.shard


class Extension:
    """The payloads that are gathered in place of one parameter.

    Attributes:
        sources: the tensors, once something was gathered or traced.
        metadata: the metadata that compiled graphs read. Its tensors are copies, whose values each
            forward replaces.
    """

    def __init__(self, parameter: ShardedParameter, blueprint: Blueprint) -> None:
        self._parameter = weakref.ref(parameter)
        self._methods: OwnMethods | InnerTensors = (
            OwnMethods(blueprint)
            if says_what_to_gather(blueprint.parameter)
            else InnerTensors(blueprint.parameter)
        )
        self.sources: list[Payload] = []
        self.metadata: Any = None
        self._traced: tuple[list[Any], Any] | None = None  # leaves and structure of `metadata`
        self._served: set[Source] = set()

    @property
    def is_prepared(self) -> bool:
        """Whether a graph may read the payloads and the metadata; eager code keeps no metadata."""
        return self._traced is not None

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, local: Any) -> Any:
        """Takes the payloads of ``local``, the shard as it is now, and returns the metadata."""
        parameter = self._parameter()
        assert parameter is not None  # it calls this
        if not self._methods.takes(local):
            raise Zero3Error(
                f"the shard of '{parameter.fqn}' is a {type(local).__name__} now, without "
                f"{self._methods.needed} that it had when it was sharded"
            )
        _C.note_other_gather(parameter.handle)
        inputs, metadata = self._methods.pre_all_gather(local, parameter.handle)
        if not self.sources:
            self.sources = [Payload(parameter, i, each) for i, each in enumerate(inputs)]
            parameter.update_facts()
        if len(inputs) != len(self.sources):
            raise Zero3Error(
                f"fsdp_pre_all_gather of '{parameter.fqn}' gave {len(inputs)} tensors, and "
                f"{len(self.sources)} the first time: it always gives as many"
            )
        for payload, value in zip(self.sources, inputs, strict=True):
            sizes = [parameter.handle.world_size * value.shape[0], *value.shape[1:]]
            if payload.handle.sizes != sizes or payload.compute_dtype != value.dtype:
                raise Zero3Error(
                    f"fsdp_pre_all_gather of '{parameter.fqn}' gave a {value.dtype} tensor "
                    f"{list(value.shape)} for '{payload.fqn}' {payload.handle.sizes} of "
                    f"{payload.compute_dtype}: shapes and dtypes must stay as they were"
                )
            payload.handle.take(value.detach().contiguous())
        return metadata

    def prepare_graph(self, local: torch.Tensor) -> None:
        """Takes the payloads and the metadata for the run of a graph, or for its tracing."""
        metadata = self.take(local)
        leaves, structure = torch_internals.tree_flatten(metadata)
        if self._traced is None:
            copies = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self.metadata = torch_internals.tree_unflatten(copies, structure)
            self._traced = copies, structure
            return
        traced, traced_structure = self._traced
        if structure != traced_structure or not all(map(_is_alike, traced, leaves)):
            parameter = cast(ShardedParameter, self._parameter())
            raise Zero3Error(
                f"fsdp_pre_all_gather of '{parameter.fqn}' gave metadata that is not what graphs "
                "were compiled with: what changes from step to step must be the values of tensors"
            )
        for mine, value in zip(traced, leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                _overwrite(mine, value)

    def prepare_op(self, source: Source, local: torch.Tensor) -> None:
        """Prepares an operator that gathers ``source``. A graph may have them in any order."""
        if not self._served or source in self._served:
            self.prepare_graph(local)
            self._served.clear()
        self._served.add(source)

    def full(self, gathered: Sequence[torch.Tensor], metadata: Any) -> torch.Tensor:
        """Returns the full parameter that the gathered payloads make up."""
        parameter = cast(ShardedParameter, self._parameter())
        full = self._methods.post_all_gather(gathered, metadata)
        sizes = parameter.handle.sizes
        if list(full.shape) == sizes:
            return full
        if torch_internals.is_wrapper(full) or full.numel() < math.prod(sizes):
            raise Zero3Error(
                f"fsdp_post_all_gather of '{parameter.fqn}' gave shape {list(full.shape)}, and the "
                f"parameter has {sizes}"
            )
        return full.as_strided(sizes, parameter.handle.strides, 0)  # without padding


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    mark_metadata(copy)
    return copy


def _is_alike(traced: Any, value: Any) -> bool:
    """Returns whether a graph that reads ``traced`` may run with the values of ``value``."""
    if isinstance(traced, torch.Tensor):
        kind = traced.shape, traced.dtype, traced.device
        return isinstance(value, torch.Tensor) and kind == (value.shape, value.dtype, value.device)
    return bool(traced == value)


@torch.no_grad()
def _overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Writes to a tensor that graphs have saved, whose values are of one step in any case."""
    with torch.autograd._unsafe_preserve_version_counter((tensor,)):
        tensor.copy_(value)
