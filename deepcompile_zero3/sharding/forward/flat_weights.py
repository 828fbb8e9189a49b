"""Recurrent modules, whose list of weights torch keeps beside their parameters."""

import torch
from torch import nn

from deepcompile_zero3 import torch_internals


class ReadsFlatWeights:
    """Base of sharded ``nn.RNNBase`` modules: weights are read when a forward asks for them.

    torch keeps the weights in a list of the module too, where full tensors would stay and go stale.
    """

    _flat_weights_names: list[str]

    @property
    def _flat_weights(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, weights: list[torch.Tensor]) -> None:
        pass

    def _update_flat_weights(self) -> None:
        pass

    def flatten_parameters(self) -> None:
        """Does nothing: cuDNN may not move gathered weights, and copies them instead."""


def forget_flat_weights(module: nn.Module) -> None:
    """Frees the list of weights of a module that has become one of :class:`ReadsFlatWeights`."""
    module.__dict__.pop(torch_internals.FLAT_WEIGHTS, None)
