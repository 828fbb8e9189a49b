"""The attributes and methods of a shard, without its data.

``fsdp_post_all_gather`` is a method of the local tensor, and needs little of it. If a graph took
the tensor itself, it would take all inner tensors with it, and how many there are may change from
step to step: torchao's weights get a scale once it is computed ahead of the forward. A compiler
then compiles again, or fails.
"""

import functools
from typing import Any

import torch

_OF_TENSORS = ("shape", "dtype", "device", "requires_grad")


class _Attributes:
    """Base of the classes that :func:`follow` makes objects of."""

    # Beside ``__dict__``, which is that of a tensor.
    __slots__ = (*_OF_TENSORS, "__dict__")

    def size(self, dim: int | None = None) -> Any:
        """Returns the size of the shard."""
        return self.shape if dim is None else self.shape[dim]  # type: ignore[attr-defined]


def follow(attributes: Any, local: torch.Tensor) -> Any:
    """Returns an object with the attributes and methods of ``local``, which stands for ``self``.

    Attributes are the tensor's own, as they are when they are read.

    Args:
        attributes: what was returned before, which is kept if it can be; or None.
        local: a tensor of a subclass.
    """
    cls = _class_like(type(local))
    if type(attributes) is not cls:
        attributes = object.__new__(cls)
    for name in _OF_TENSORS:
        setattr(attributes, name, getattr(local, name))
    if attributes.__dict__ is not local.__dict__:
        attributes.__dict__ = local.__dict__
    return attributes


@functools.cache
def _class_like(original: Any) -> type:
    """Returns a class with what a tensor subclass defines, calls of which make its tensors."""
    body: dict[str, Any] = {}
    for cls in reversed(original.__mro__[: original.__mro__.index(torch.Tensor)]):
        for name, value in vars(cls).items():
            if name.startswith("__"):
                continue
            # Class methods make tensors of the subclass.
            is_bound = isinstance(value, classmethod)
            body[name] = staticmethod(getattr(original, name)) if is_bound else value
    body["__new__"] = lambda cls, *args, **kwargs: original(*args, **kwargs)
    body["__slots__"] = ()
    return type(original.__name__, (_Attributes,), body)
