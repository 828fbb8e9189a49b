"""Parameters that are gathered as other tensors: FSDP2's all-gather extensions.

The local tensor of such a parameter is a tensor subclass with two methods. ``fsdp_pre_all_gather``
returns the tensors that are gathered in the parameter's place, the *payloads*, and metadata.
``fsdp_post_all_gather`` makes the full parameter of the gathered payloads. A payload is one more
parameter of the runtime, without a gradient. In a compiled graph, the payloads are inputs, and what
``fsdp_post_all_gather`` computes of them is traced.
"""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.layout import Layout

# Attribute of a placeholder: a weak reference to its parameter or payload.
PLACEHOLDER_OF = "_zero3_placeholder_of"


class _Owner(Protocol):
    """The part of ``ShardedParameter`` that its payloads need."""

    layout: Layout
    handle: _C.Parameter
    placeholder: nn.Parameter
    group: "weakref.ref[object] | None"
    reshard_after_forward: bool | None

    @property
    def fqn(self) -> str: ...
    @property
    def model(self) -> Any: ...
    @property
    def shard_group_name(self) -> str: ...
    def prepare_forward(self) -> bool: ...


def has_extension(local: torch.Tensor) -> bool:
    """Returns whether a local tensor says what is gathered in its place."""
    methods = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    return all(hasattr(local, name) for name in methods)


class Payload:
    """A tensor that is gathered in place of a parameter, as compiled graphs know parameters.

    Attributes:
        owner: the parameter.
        fqn: the parameter's name and the payload's number, for people.
        placeholder: the tensor that a traced graph takes in place of the gathered payload.
        handle: the payload in the C++ runtime.
    """

    extension = None
    is_read_as_gathered = True

    def __init__(self, owner: _Owner, number: int, value: torch.Tensor) -> None:
        self.owner = owner
        self.fqn = f"{owner.fqn}.payload_{number}"
        self._is_first = number == 0
        world_size = owner.handle.world_size
        sizes = [world_size * value.shape[0], *value.shape[1:]]
        like = torch.empty(sizes, dtype=value.dtype, device="meta")
        strides, device = list(like.stride()), owner.handle.device
        self.placeholder = nn.Parameter(
            _C.make_placeholder(sizes, strides, value.dtype, device), requires_grad=False
        )
        setattr(self.placeholder, PLACEHOLDER_OF, weakref.ref(self))
        self.compute_dtype = value.dtype
        self.handle = _C.Parameter(
            sizes=sizes,
            strides=strides,
            compute_dtype=value.dtype,
            device=device,
            rank=owner.handle.rank,
            world_size=world_size,
            placeholder=self.placeholder,
        )
        self.handle.transport = owner.handle.messages
        self.handle.fqn = self.fqn
        self.handle.model_number = -1  # no gradient of it is ever missing
        self.handle.register()

    @property
    def settings(self) -> _C.Settings:
        """Settings of the handle."""
        return self.handle.settings

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part of the payload."""
        return self.handle.shard

    @property
    def group(self) -> "weakref.ref[object] | None":
        """The group that gathers the parameter."""
        return self.owner.group

    @property
    def model(self) -> Any:
        """The model of the parameter."""
        return self.owner.model

    @property
    def nbytes(self) -> int:
        """Size in bytes of the gathered payload."""
        return self.placeholder.numel() * self.placeholder.element_size()

    @property
    def reshard_after_forward(self) -> bool | None:
        """The parameter's own choice."""
        return self.owner.reshard_after_forward

    @property
    def shard_group_name(self) -> str:
        """Name of the process group of the ranks that have the shards."""
        return self.owner.shard_group_name

    def prepare_forward(self) -> bool:
        """Prepares the parameter, unless it is an input of the same graph."""
        is_input = self.owner.placeholder.requires_grad and torch.is_grad_enabled()
        return is_input or not self._is_first or self.owner.prepare_forward()


class Extension:
    """What is gathered in place of one parameter.

    Attributes:
        payloads: the tensors, from the first forward on.
    """

    def __init__(self, owner: _Owner, module: nn.Module, mp_policy: MixedPrecisionPolicy) -> None:
        self._owner = weakref.ref(owner)
        self._module = weakref.ref(module)
        self._mp_policy = mp_policy
        self.payloads: list[Payload] = []
        self._metadata: Any = None
        self.local = torch.empty(0)

    def prepare(self, local: torch.Tensor) -> None:
        """Takes the payloads of ``local``, the shard as it is now."""
        owner = self._owner()
        assert owner is not None  # which calls this
        self.local = local
        inputs, metadata = self._pre_all_gather(owner, local)
        sizes = [list(each.shape) for each in inputs]
        if not self.payloads:
            self.payloads = [Payload(owner, i, each) for i, each in enumerate(inputs)]
            self._metadata = metadata
        else:
            self._metadata = _updated(self._metadata, metadata)
        for payload, value, size in zip(self.payloads, inputs, sizes, strict=False):
            rows = [owner.handle.world_size * size[0], *size[1:]] if size else []
            if payload.handle.sizes != rows or payload.compute_dtype != value.dtype:
                raise Zero3Error(
                    f"fsdp_pre_all_gather of '{owner.fqn}' gave a {value.dtype} tensor {size} for "
                    f"'{payload.fqn}' {payload.handle.sizes} of {payload.compute_dtype}: shapes "
                    "and dtypes must stay as they were in the first forward"
                )
            payload.handle.shard = value.detach().contiguous()

    def _pre_all_gather(self, owner: _Owner, local: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        mesh = owner.layout.shard_mesh
        takes = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
        if takes == 1:
            inputs, metadata = local.fsdp_pre_all_gather(mesh)
        elif takes == 5:
            shape = torch.Size(owner.handle.sizes)
            stride = tuple(owner.handle.strides)
            inputs, metadata = local.fsdp_pre_all_gather(
                mesh, shape, stride, self._module(), self._mp_policy
            )
        else:
            raise Zero3Error(
                f"fsdp_pre_all_gather of '{owner.fqn}' takes {takes} arguments; it takes a mesh, "
                "or a mesh, the outer size, the outer stride, the module and the mp_policy"
            )
        inputs = tuple(inputs)
        for each in inputs:
            if torch_internals.is_wrapper(each) or each.dim() == 0:
                raise Zero3Error(
                    f"fsdp_pre_all_gather of '{owner.fqn}' gave a {type(each).__name__} of shape "
                    f"{list(each.shape)}: it gives plain tensors of at least one dimension"
                )
        return inputs, metadata

    def full(self, gathered: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the full parameter that the gathered payloads make up."""
        local: Any = self.local
        dtype = self._mp_policy.param_dtype or local.dtype
        full, _ = local.fsdp_post_all_gather(tuple(gathered), self._metadata, dtype)
        return full


def _updated(before: Any, now: Any) -> Any:
    """Returns ``now``, with its values in the tensors of ``before``, which compiled graphs read."""
    old, structure = torch_internals.tree_flatten(before)
    new, other = torch_internals.tree_flatten(now)
    if structure != other:
        return now
    for position, (mine, value) in enumerate(zip(old, new, strict=True)):
        if not (isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor)):
            old[position] = value
        elif mine is not value:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter((mine,)):
                mine.copy_(value)
    return torch_internals.tree_unflatten(old, structure)
