"""A small sharded model that is streamed in many buckets."""

from support.models import Stack, shard

SMALL = 600 / 2**20  # MiB: some ten buckets


class Fault(Exception):
    """An error of a consumer."""


def sharded_stack():
    model = Stack()
    return shard(model, model.blocks)[0]


def full_values(model):
    """Returns copies of the full parameters by name."""
    return {name: each.full_tensor().detach().clone() for name, each in model.named_parameters()}
