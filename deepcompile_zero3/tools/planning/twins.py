"""Copies of the runtime's parameters without data, on ranks that send nothing."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.source import Source

_PREFIX = "simulated: "
_UNBOUNDED = 1 << 62
_SETTINGS = ("gradient_dtypes", "bucket_bytes", "divide_factor")


@contextlib.contextmanager
def twins_of(parameters: Mapping[str, Source], backend: str) -> Iterator[dict[str, _C.Parameter]]:
    """Yields copies of the runtime's ``parameters``, by FQN. They make a model on the meta device.

    Their ranks exchange messages, with the buffers that ``backend``, one of c10d, needs. Buckets
    are not bounded where a parameter's own transport does not bound them.
    """

    def channel(name: str, rank: int, world_size: int) -> _C.Channel:
        return _C.SimulatedChannel(name, rank, world_size, backend)

    model_number = max(_C.live_model_numbers(), default=0) + 1
    twins = {}
    try:
        for name, parameter in parameters.items():
            handle = parameter.handle
            other = handle.replicas
            twin = _C.Parameter(
                sizes=handle.sizes,
                strides=handle.strides,
                compute_dtype=handle.compute_dtype,
                device=torch.device("meta"),
                rank=handle.rank,
                world_size=handle.world_size,
                owner=handle.owner,
                replicas=other and channel(other.name, other.rank, other.world_size),
            )
            shards = channel(str(parameter.facts.process_group), handle.rank, handle.world_size)
            twin.transport = _C.Messages(shards, shards)
            for setting in _SETTINGS:
                setattr(twin.settings, setting, getattr(handle.settings, setting))
            if not handle.can.bounds_buckets:
                twin.settings.bucket_bytes = _UNBOUNDED
            shard = handle.shard  # a tensor subclass may have no empty_like
            twin.shard = torch.empty_strided(
                shard.shape, shard.stride(), dtype=shard.dtype, device="meta"
            )
            twin.model_number = model_number
            twin.fqn = _PREFIX + name
            twin.register()
            twins[name] = twin
        yield twins
    finally:
        twins.clear()


def names_in(record: _C.Collective) -> tuple[str, ...]:
    """Returns the FQNs of the parameters of a collective of such copies."""
    return tuple(name.removeprefix(_PREFIX) for name in record.params)
