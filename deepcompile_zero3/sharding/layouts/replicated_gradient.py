"""The gradient of a parameter that all ranks have whole: see ``layout``."""

from typing import Any

from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals


class ReplicatedGradient(DTensor):
    """A replicated DTensor that a ``GradScaler`` may find ahead of sharded ones.

    torch tells all ranks that one of them has found an infinity as the first gradient of a list is
    sharded: if that is replicated, it tells nobody, and the others take the step.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func`` as a DTensor would, for sharded gradients ahead of these."""
        if getattr(func, "__name__", "") == "_amp_foreach_non_finite_check_and_unscale_":
            gradients, *others = args
            sharded = [each for each in gradients if not isinstance(each, cls)]
            if sharded:
                func(sharded, *others)
            args = [each for each in gradients if isinstance(each, cls)], *others
        with torch_internals.WithoutTorchFunction():
            return func(*args, **(kwargs or {}))

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> "ReplicatedGradient":
        """See DTensor: what Dynamo has taken apart gets its class back."""
        result = DTensor.__tensor_unflatten__(*args)
        result.__class__ = ReplicatedGradient
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.detach().clone())
