"""One wrapper of ``optimizer.step``, in which features have layers; and what layers share.

::

    optimizer.step()  ->  closure  ->  in parts  ->  on local tensors  ->  the optimizer's own step

The order of the layers is that of their use, whichever feature was asked for first.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.torch_internals.optimizers import has_step_of_its_class

# Gets the optimizer and the rest of its step, which it may call several times.
Layer = Callable[[torch.optim.Optimizer, Callable[[], object]], None]

_LAYERS = "_zero3_step_layers"  # attribute of an optimizer


class StepLayers:
    """The layers around an optimizer's step. They do not keep the optimizer alive.

    Attributes:
        in_parts: steps some of the parameters at a time, or None.
        has_more_parts: whether the call of the optimizer's own step is one of parts, and not the
            last one.
        locally: puts other tensors in the place of DTensors, or None.
        has_step_of_its_class: whether nobody but a scheduler had put another function in place of
            ``step`` when the first layer came.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.in_parts: Layer | None = None
        self.has_more_parts = False
        self.locally: Layer | None = None
        self.has_step_of_its_class = has_step_of_its_class(optimizer)
        own_step = function_of(optimizer.step)

        @functools.wraps(own_step)
        def step(optimizer: torch.optim.Optimizer, closure: Any = None, **kwargs: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            rest = functools.partial(own_step, optimizer, **kwargs)
            for layer in (self.locally, self.in_parts):  # the innermost one first
                if layer is not None:
                    rest = functools.partial(layer, optimizer, rest)
            rest()
            return loss

        self._method = cast(Any, optimizer).step = WeakMethod(step, optimizer)

    def are_in(self, step: Any) -> bool:
        """Returns whether ``step`` is, or wraps, the method that has these layers."""
        while step is not None and step is not self._method:
            step = getattr(step, "__wrapped__", None)
        return step is not None


def layers_of(optimizer: torch.optim.Optimizer) -> StepLayers:
    """Returns the layers of ``optimizer.step``, which is wrapped if it has none yet.

    Somebody may have put back the step that was there before.
    """
    attributes = vars(optimizer)
    layers = attributes.get(_LAYERS)
    if not isinstance(layers, StepLayers) or not layers.are_in(optimizer.step):
        layers = attributes[_LAYERS] = StepLayers(optimizer)
    return layers


def steps_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a layer of ``optimizer.step`` steps some of the parameters at a time."""
    layers = vars(optimizer).get(_LAYERS)
    return isinstance(layers, StepLayers) and layers.in_parts is not None


def has_more_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a call of ``optimizer``'s own step, which hooks see, is of a part before the
    last one.
    """
    layers = vars(optimizer).get(_LAYERS)
    return isinstance(layers, StepLayers) and layers.has_more_parts


def function_of(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``method`` as a function of an optimizer, which it does not keep alive."""
    if hasattr(method, "__func__"):
        return cast(Callable[..., Any], method.__func__)
    # A scheduler's function has a weak reference to the optimizer.
    return lambda _, *args, **kwargs: method(*args, **kwargs)


class WeakMethod:
    """A bound method whose object is not kept alive by it."""

    def __init__(self, function: Callable[..., Any], owner: object) -> None:
        functools.update_wrapper(self, function)
        self.__func__ = function
        self._owner = weakref.ref(owner)

    @torch_internals.disable_dynamo  # it exchanges the optimizer's tensors, as no graph can
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method."""
        return self.__func__(self._owner(), *args, **kwargs)


@contextlib.contextmanager
def parameters_replaced(
    optimizer: torch.optim.Optimizer, replacements: Sequence[list[torch.Tensor]]
) -> Iterator[None]:
    """Replaces the parameters of each group in the block, and restores them at its end."""
    groups = optimizer.param_groups
    given = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, replacements, strict=True):
            group["params"] = parameters
        yield
    finally:
        for group, parameters in zip(groups, given, strict=True):
            group["params"] = parameters
