"""Sharding where transformers loads a model."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.conversion import follow_registered_shards
from deepcompile_zero3.sharding.fully_shard import fully_shard
from deepcompile_zero3.sharding.module import Zero3Module

_running = threading.Lock()  # held while a block is open


@contextlib.contextmanager
def shard_in_transformers() -> Iterator[None]:
    """Makes ``from_pretrained(..., distributed_config=...)`` call this library's ``fully_shard``.

    transformers 5 calls ``fully_shard`` by a name in its module ``transformers.distributed.fsdp``,
    and takes no other function. That name is rebound while the block runs, for all threads of the
    process, and restored at its end.

    Raises:
        ImportError: this release of transformers does not shard models.
        Zero3Error: another such block is open.

    Example::

        with shard_in_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                path, distributed_config=DistributedConfig(fsdp_size=8)
            )
    """
    try:
        from transformers.distributed import fsdp

        _ = fsdp.fully_shard
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "shard_in_transformers needs a transformers whose from_pretrained shards by "
            "DistributedConfig(fsdp_size=...): install another, or call fully_shard on the model"
        ) from error
    sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @functools.wraps(fully_shard)
    def shard(module: Any, **settings: Any) -> Any:
        fully_shard(module, **settings)
        sharded.update(module if isinstance(module, list | tuple) else [module])
        return module

    if not _running.acquire(blocking=False):
        raise Zero3Error(
            "shard_in_transformers() runs already, here or in another thread: wait for the end of "
            "its block"
        )
    original, fsdp.fully_shard = fsdp.fully_shard, shard
    try:
        yield
    finally:
        fsdp.fully_shard = original
        _running.release()
    # Loading has replaced the shards. A forward of experts may hide them: see `is_local_part`.
    for module in sharded:
        if isinstance(module, Zero3Module):  # not if it lies inside another of its list
            follow_registered_shards(module._zero3_group.parameters)
