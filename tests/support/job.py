"""A job of one rank in the test's process, for tests that do not depend on the world size."""

import gc

import pytest
import torch
import torch.distributed as dist

from deepcompile_zero3.runtime import _C


def start(backend, folder, **settings):
    from support import quick_torch  # noqa: F401 (imports torch's compiler)

    gc.collect()  # frees an earlier test's model, and with it the model's name
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1, **settings)
    torch.manual_seed(0)


def end():
    torch._dynamo.reset()
    dist.destroy_process_group()
    collect_for_good()


def collect_for_good():
    """Frees what a test leaves. What modules imported and caches keep is not visited again."""
    gc.collect()
    if not _C.live_model_numbers():  # a later collection may free a model that is alive
        gc.freeze()


needs_a_job = pytest.mark.usefixtures("one_rank")
