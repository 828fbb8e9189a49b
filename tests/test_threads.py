"""Two models of one process, each trained by a thread and over a process group of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from models import (
    Stack,
    assert_same_parameters,
    batch_of,
    compiled,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from torch.distributed.device_mesh import DeviceMesh

_BATCHES = [batch_of(4, 512, seed=seed) for seed in range(8)]  # gradients in several blocks


def _train(run, optimizer, batches):
    for batch in batches:
        mean_square(run, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train_in_two_threads(how, transport):
    trained = []
    for seed in range(2):
        torch.manual_seed(seed)
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        model, reference = shard(Stack(512), mesh=mesh, transport=transport)
        optimizer, of_reference = optimizers_of(model, reference)
        _train(reference, of_reference, _BATCHES)
        run = compiled(model, how)
        batches = [mine(batch) for batch in _BATCHES]
        _train(run, optimizer, batches[:1])  # compiles: torch lets one thread at a time do so
        trained.append((model, reference, run, optimizer, batches[1:]))
    with ThreadPoolExecutor() as threads:
        for thread in [threads.submit(_train, *arguments) for _, _, *arguments in trained]:
            thread.result()
    for model, reference, *_ in trained:
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("transport", ["auto", "c10d"])
@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_two_threads_train_two_models(run_ranks, how, transport):
    run_ranks(2, _train_in_two_threads, how, transport)
