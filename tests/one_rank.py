"""A job of one rank in the test's own process, for what does not depend on the world size."""

import gc

import pytest
import torch
import torch.distributed as dist


def start(backend, folder, **settings):
    gc.collect()  # what an earlier test left, and with it the name of its model
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1, **settings)
    torch.manual_seed(0)


def end():
    torch._dynamo.reset()
    dist.destroy_process_group()
    gc.collect()


@pytest.fixture
def one_rank(tmp_path):
    """A gloo process group of one rank; what the test sharded is gone afterwards, names too."""
    start("gloo", tmp_path)
    yield
    end()
