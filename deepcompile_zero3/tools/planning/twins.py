"""Copies of the runtime's parameters without data, on ranks that send nothing."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch

from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.source import Source

Twin: TypeAlias = _C.Parameter | _C.Source

_PREFIX = "simulated: "
_UNBOUNDED = 1 << 62


@contextlib.contextmanager
def twins_of(sources: Mapping[str, Source], backend: str) -> Iterator[dict[str, Twin]]:
    """Yields copies of the runtime's ``sources``, by FQN. They make a model on the meta device.

    Their ranks exchange messages, with the buffers that ``backend``, one of c10d, needs. Buckets
    are not bounded where a parameter's own transport does not bound them.
    """

    def channel(name: str, rank: int, world_size: int) -> _C.Channel:
        return _C.SimulatedChannel(name, rank, world_size, backend)

    model_number = max(_C.live_model_numbers(), default=0) + 1
    twins: dict[str, Twin] = {}
    try:
        for name, source in sources.items():
            handle = source.handle
            shards = channel(str(source.facts.process_group), handle.rank, handle.world_size)
            twin = _C.Source(
                sizes=handle.sizes,
                strides=handle.strides,
                dtype=handle.dtype,
                device=torch.device("meta"),
                rank=handle.rank,
                layout=handle.layout,
                transport=_C.Messages(shards, shards),
                placeholder=_leaf_like(source.placeholder),
                fqn=_PREFIX + name,
            )
            shard = handle.shard
            if shard is None:  # it is made of parts when it is gathered
                shard = torch.empty(handle.shard_sizes, dtype=handle.dtype, device="meta")
            twin.take(  # a tensor subclass may have no empty_like
                torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device="meta")
            )
            if isinstance(handle, _C.Source):
                twins[name] = twin
                continue
            other = handle.replicas
            replicas = other and channel(other.name, other.rank, other.world_size)
            of_user = handle.settings
            is_bounded = handle.can.bounds_buckets or replicas is not None
            settings = _C.Settings(
                gradient_dtypes=of_user.gradient_dtypes,
                divide_factor=of_user.divide_factor,
                bucket_bytes=of_user.bucket_bytes if is_bounded else _UNBOUNDED,
            )
            parameter = twins[name] = _C.Parameter(twin, replicas, settings)
            parameter.join(model_number, twin.fqn)
        yield twins
    finally:
        twins.clear()


def _leaf_like(placeholder: torch.Tensor) -> torch.Tensor:
    leaf = torch.empty_strided(
        placeholder.shape, placeholder.stride(), dtype=placeholder.dtype, device="meta"
    )
    return leaf.requires_grad_(placeholder.requires_grad)


def names_in(record: _C.Collective) -> tuple[str, ...]:
    """Returns the FQNs of the parameters of a collective of such copies."""
    return tuple(name.removeprefix(_PREFIX) for name in record.params)
