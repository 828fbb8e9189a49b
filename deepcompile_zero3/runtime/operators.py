"""The operators of ``zero3`` and their fake kernels.

========================================================  ========================================
``zero3::unshard(placeholder, contract)``                 returns the full tensor
``zero3::unshard_with_ordinal(placeholder, contract)``    returns it and the parameter's ordinal
``zero3::unshard_as(full, placeholder, contract)``        returns ``full``, made of its payloads
``zero3::all_gather_start(placeholders, after, ...)``     starts a gather, returns a handle
``zero3::all_gather_wait(handle, placeholders, after)``   returns full tensors and a token
``zero3::all_gather_views(handle, placeholders, after)``  likewise, as views of shared memory
``zero3::reduce_grad(grad, placeholder, after, ...)``     takes a full gradient, returns a token
``zero3::reduce_mm(factors, placeholder, after, ...)``    takes a gradient as factors of a product
``zero3::reduce_rows(rows, placeholder, after, ...)``     takes a gradient as indices and values
``zero3::store_start(tensor, tier, after)``               starts a copy to a file, or from a GPU to
                                                          host memory; returns a handle
``zero3::store_wait(handle, tensor, after)``              returns that copy
``zero3::load_start(stored, after, device)``              starts to copy it back, returns a handle
``zero3::load_wait(handle, stored, after, device)``       returns what was copied back
========================================================  ========================================

Rewritten graphs contain gathers and reductions in place of ``unshard``. The gradient of
``reduce_rows`` is zeros to which the values are added at the indices.

A *placeholder* has the full shape, compute dtype and strides of a parameter, and zero bytes of
storage. The runtime finds the parameter by the address of that storage. ``reduce_grad`` also takes
the *ordinal* of a parameter among all that a process has had, int64 [1]. A *token* is an empty
tensor. An op that starts or waits for a collective takes the handle or token of the one before it
as ``after``, so that no scheduler swaps two. ``all_gather_start`` also takes ``formats``: the
format of each shard on its way (see ``codec``), if one is quantized. Reductions also take ``use``
and ``contract``: *contract* is the leaf's dtype as text; *use* tells equal gradients of two uses
apart.

Where another backend compiles, the graph saves the ordinal of a parameter of four dimensions from
forward to backward: Inductor would copy the placeholder of a convolution's weight into the layout
of channels last, and so read it. ``unshard(..., saves_placeholder=True)`` prevents that.
"""

from collections.abc import Sequence

import torch
from torch import library

from deepcompile_zero3.runtime import load  # noqa: F401 (which defines the operators)

ops = torch.ops.zero3


@library.register_fake("zero3::unshard")
def _(placeholder: torch.Tensor, contract: str, saves_placeholder: bool = False) -> torch.Tensor:
    return torch.empty_like(placeholder)


@library.register_fake("zero3::unshard_with_ordinal")
def _(placeholder: torch.Tensor, contract: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(placeholder), torch.empty(1, dtype=torch.int64, device="cpu")


@library.register_fake("zero3::unshard_as")
def _(full: torch.Tensor, placeholder: torch.Tensor, contract: str) -> torch.Tensor:
    return torch.empty_like(full)


@library.register_fake("zero3::all_gather_start")
def _(
    placeholders: Sequence[torch.Tensor], after: torch.Tensor | None = None, formats: str = ""
) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@library.register_fake("zero3::all_gather_wait")
def _(
    handle: torch.Tensor, placeholders: Sequence[torch.Tensor], after: torch.Tensor | None = None
) -> list[torch.Tensor]:
    return [*(torch.empty_like(p) for p in placeholders), placeholders[0].new_empty(0)]


@library.register_fake("zero3::all_gather_views")
def _(
    handle: torch.Tensor, placeholders: Sequence[torch.Tensor], after: torch.Tensor | None = None
) -> list[torch.Tensor]:
    return [*placeholders, placeholders[0].new_empty(0)]


@library.register_fake("zero3::reduce_grad")
def _(
    grad: torch.Tensor,
    placeholder: torch.Tensor,
    after: torch.Tensor | None = None,
    use: int = 0,
    contract: str = "",
) -> torch.Tensor:
    return grad.new_empty(0)


@library.register_fake("zero3::reduce_mm")
@library.register_fake("zero3::reduce_rows")
def _(
    inputs: Sequence[torch.Tensor],
    placeholder: torch.Tensor,
    after: torch.Tensor | None = None,
    use: int = 0,
    contract: str = "",
) -> torch.Tensor:
    return inputs[-1].new_empty(0)


@library.register_fake("zero3::store_start")
def _(
    tensor: torch.Tensor, tier: int | None = None, after: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@library.register_fake("zero3::load_start")
def _(stored: torch.Tensor, after: torch.Tensor | None = None, device: str = "") -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@library.register_fake("zero3::store_wait")
def _(
    handle: torch.Tensor, tensor: torch.Tensor, after: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu")


@library.register_fake("zero3::load_wait")
def _(
    handle: torch.Tensor,
    stored: torch.Tensor,
    after: torch.Tensor | None = None,
    device: str = "",
) -> torch.Tensor:
    return torch.empty_like(stored, device=device or None)


REDUCTIONS = (ops.reduce_grad.default, ops.reduce_mm.default, ops.reduce_rows.default)

WAITS = (ops.all_gather_wait.default, ops.all_gather_views.default)

# Copies of activations, beside the computation.
STORES = (ops.store_start.default, ops.store_wait.default)
LOADS = (ops.load_start.default, ops.load_wait.default)

# Without this, compilers delete these ops as dead code. Nothing reads the result of a reduction.
# Possibly nothing reads a gathered tensor either, but other ranks wait for this rank's gather.
for _op in (*REDUCTIONS, ops.all_gather_start.default, *WAITS):
    torch.fx.node.has_side_effect(_op)
