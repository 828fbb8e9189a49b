"""The attributes and methods of a shard, without its data.

``fsdp_post_all_gather`` is a method of the local tensor, and needs little of it. If a graph took
the tensor itself, all inner tensors would become inputs, too. Their number may change from step to
step: torchao's weights get a scale once it is computed ahead of the forward. A compiler would then
compile again, or fail.
"""

import functools
import types
from typing import Any

import torch

_OF_TENSORS = ("shape", "dtype", "device", "requires_grad", "layout")
_CALLED = {"stride": "_strides", "is_contiguous": "_is_contiguous"}


class _Attributes:
    """Base of the classes that :func:`follow` makes objects of: how a tensor describes itself."""

    # Beside the tensor's own ``__dict__``.
    __slots__ = (*_OF_TENSORS, *_CALLED.values(), "__dict__")
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    _strides: tuple[int, ...]
    _is_contiguous: bool

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        return self._strides if dim is None else self._strides[dim]

    def is_contiguous(self) -> bool:
        return self._is_contiguous

    def dim(self) -> int:
        return len(self.shape)

    ndimension = dim
    ndim = property(dim)

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    def element_size(self) -> int:
        return self.dtype.itemsize

    itemsize = property(element_size)
    nbytes = property(lambda self: self.numel() * self.itemsize)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    is_cpu = property(lambda self: self.device.type == "cpu")
    is_cuda = property(lambda self: self.device.type == "cuda")
    is_meta = property(lambda self: self.device.type == "meta")

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index


def follow(attributes: Any, local: torch.Tensor) -> Any:
    """Returns an object with the attributes and methods of ``local``, which stands for ``self``.

    Attributes are the tensor's own, as they are when they are read.

    Args:
        attributes: the object that an earlier call returned, to be updated if possible; or None.
        local: a tensor of a subclass.
    """
    cls = _class_like(type(local))
    if type(attributes) is not cls:
        attributes = object.__new__(cls)
    for name in _OF_TENSORS:
        setattr(attributes, name, getattr(local, name))
    for method, name in _CALLED.items():
        setattr(attributes, name, getattr(local, method)())
    if attributes.__dict__ is not local.__dict__:
        attributes.__dict__ = local.__dict__
    return attributes


@functools.cache
def _class_like(original: Any) -> Any:
    """Returns a class with a tensor subclass's definitions. Calling it makes such tensors."""
    if original is torch.Tensor:
        return _Attributes
    if not issubclass(original, torch.Tensor):
        return original
    new: dict[str, Any] = {"__slots__": (), "__new__": lambda _, *args, **kw: original(*args, **kw)}
    bases = dict.fromkeys(map(_class_like, original.__bases__))
    cls = type(original.__name__, tuple(bases), new)
    for name, value in vars(original).items():
        if not name.startswith("__"):
            setattr(cls, name, _defined_in(cls, original, name, value))
    return cls


def _defined_in(cls: type, original: type, name: str, value: Any) -> Any:
    """Returns the attribute of ``cls`` for ``original.name``, which is defined as ``value``."""
    if isinstance(value, classmethod):  # makes tensors of the original
        return staticmethod(getattr(original, name))
    if isinstance(value, property):
        functions = value.fget, value.fset, value.fdel
        return property(*(_defined_in(cls, original, name, function) for function in functions))
    if isinstance(value, types.FunctionType) and "__class__" in value.__code__.co_freevars:
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        cells["__class__"] = types.CellType(cls)  # in which super() looks
        parts = value.__code__, value.__globals__, value.__name__, value.__defaults__
        function = types.FunctionType(*parts, tuple(cells.values()))
        function.__kwdefaults__ = value.__kwdefaults__
        return function
    return value
