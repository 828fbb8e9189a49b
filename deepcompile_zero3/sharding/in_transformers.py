"""Sharding where transformers loads a model."""

import contextlib
from collections.abc import Iterator

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.fully_shard import fully_shard


@contextlib.contextmanager
def shard_in_transformers() -> Iterator[None]:
    """Makes ``from_pretrained(..., distributed_config=...)`` shard with ``fully_shard`` of here.

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

        original = fsdp.fully_shard
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "shard_in_transformers needs a transformers whose from_pretrained shards by "
            "DistributedConfig(fsdp_size=...): install another, or call fully_shard on the model"
        ) from error
    if original is fully_shard:
        raise Zero3Error("shard_in_transformers() runs already, here or in another thread")
    fsdp.fully_shard = fully_shard  # type: ignore[assignment]
    try:
        yield
    finally:
        fsdp.fully_shard = original
