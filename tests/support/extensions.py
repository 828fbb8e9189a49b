"""Tensor subclasses that say what is gathered in their place, as FSDP2's users write them."""

import torch
from torch.utils import _pytree as pytree

_STAYS = {  # operators whose results are of the subclass
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.mul_.Tensor,
}


class Wrapped(torch.Tensor):
    """A tensor around another one. Subclasses say what is gathered."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"{type(self).__name__}({self.inner})"

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = pytree.tree_map_only(Wrapped, lambda each: each.inner, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func in _STAYS:
            if func.overloadpacket.__name__.endswith("_"):
                return args[0]
            return pytree.tree_map_only(torch.Tensor, cls, result)
        return result


class Bf16Gathered(Wrapped):
    """Gathered in bfloat16, padded to the rows of the largest shard."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(module, torch.nn.Linear)
        assert mp_policy.reduce_dtype is None
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.zeros(rows, *self.shape[1:], dtype=torch.bfloat16)
        padded[: self.shape[0]] = self.inner
        return (padded,), (outer_size,)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert out is None
        (full,), (outer_size,) = outputs, metadata
        return full[: outer_size[0]], outputs


class Int8Gathered(Wrapped):
    """Gathered as integers, with a scale of each rank beside them, and one for all ranks.

    Reads as ``numbers * scale * factor``.
    """

    factor = torch.ones(())

    def fsdp_pre_all_gather(self, mesh):
        scale = self.inner.detach().abs().amax().clamp_min(1e-12) / 127
        numbers = (self.inner / scale).round().to(torch.int8)
        return (numbers, scale.view(1)), {"factor": type(self).factor.clone(), "ranks": mesh.size()}

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        numbers, scales = outputs
        blocks = numbers.to(param_dtype).view(metadata["ranks"], -1)
        full = (blocks * scales[:, None].to(param_dtype) * metadata["factor"]).view(numbers.shape)
        return full, outputs


def wrap(module, cls, names=("weight",)):
    """Makes the parameters of ``module`` with these names tensors of a subclass."""
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            if name in names:
                wrapped = torch.nn.Parameter(
                    cls(parameter.detach().clone()), requires_grad=parameter.requires_grad
                )
                each.register_parameter(name, wrapped)
    return module
