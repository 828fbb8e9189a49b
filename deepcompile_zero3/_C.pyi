# Types of the C++ runtime; csrc/ says what each thing means.
from collections.abc import Callable, Sequence

import torch

class Parameter:
    def __init__(self) -> None: ...
    @property
    def fqn(self) -> str: ...
    root: int
    group_name: str
    rank: int
    world_size: int
    sizes: list[int]
    strides: list[int]
    compute_dtype: torch.dtype
    device: torch.device
    grad_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    shard_grad_dtype: torch.dtype | None
    divide_factor: float
    bucket_bytes: int
    requires_gradient_sync: bool
    shard: torch.Tensor
    gathered: torch.Tensor | None
    @property
    def accumulated(self) -> torch.Tensor | None: ...
    pending_uses: int
    def register(self, fqn: str) -> None: ...
    def unregister(self) -> None: ...

class Collective:
    @property
    def op(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def params(self) -> list[str]: ...

class CollectiveLog:
    @staticmethod
    def start() -> CollectiveLog: ...
    def stop(self) -> None: ...
    def records(self) -> list[Collective]: ...

def live_roots() -> set[int]: ...
def make_placeholder(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor: ...
def declare_grad_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> None: ...
def set_deliver(
    deliver: Callable[[Sequence[tuple[Parameter, torch.Tensor]]], None],
) -> None: ...
