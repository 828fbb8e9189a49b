"""A job of one rank in the test's own process, for what does not depend on the world size."""

import gc

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def one_rank(tmp_path):
    """A gloo process group of one rank; what the test sharded is gone afterwards, names too."""
    gc.collect()  # what an earlier test left, and with it the name of its model
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()
    gc.collect()
