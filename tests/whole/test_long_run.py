"""A thousand steps of a transformer: memory does not grow, and losses equal one process's."""

import gc
import random

import pytest
import torch
import torch.distributed as dist
from support.models import shard
from support.ranks import RankPool
from support.transformer_models import TOKENS, VOCABULARY, llama

from deepcompile_zero3 import buffer_stats

STEPS = 1000
WARM = 300  # steps after which all is compiled and allocated


def _resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _tokens(choices, rank, length):
    """Returns two sequences of a rank."""
    generator = torch.Generator().manual_seed(1000 * choices.randrange(1 << 20) + rank)
    return torch.randint(VOCABULARY, (2, length), generator=generator)


def _run():
    """Returns resident bytes once warm and at the end, and the largest difference of losses."""
    torch.manual_seed(0)
    task = llama()
    model, reference = shard(task.model, task.blocks)
    run = torch.compile(model, backend="zero3")
    # The learning rate is low, since rounding errors grow from step to step.
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, reference)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    choices = random.Random(0)  # the same on all ranks
    worst, resident, in_use = 0.0, 0, 0

    def losses(length):
        """Returns the model's loss of this rank's sequences, one process's, and that of all."""
        seed = choices.randrange(1 << 20)
        batches = [_tokens(random.Random(seed), other, length) for other in range(world_size)]
        mine = run(input_ids=batches[rank], labels=batches[rank]).loss
        whole = [reference(input_ids=batch, labels=batch).loss for batch in batches]
        return mine, whole[rank], sum(whole) / world_size

    for step in range(STEPS):
        micro_batches = choices.randint(1, 3)
        for micro_batch in range(micro_batches):
            model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
            mine, expected, whole = losses(choices.randint(4, TOKENS))
            (mine / micro_batches).backward()
            (whole / micro_batches).backward()
            worst = max(worst, abs(mine.item() - expected.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            with torch.no_grad():
                mine, expected, _ = losses(TOKENS)
            worst = max(worst, abs(mine.item() - expected.item()))
        if step == WARM:
            resident, in_use = _resident(), buffer_stats().in_use
    assert buffer_stats().in_use == in_use
    return resident, _resident(), worst


@pytest.mark.inductor
@pytest.mark.long
def test_a_thousand_steps():
    pool = RankPool(2)
    try:
        results = pool.run(_run, timeout=400)
    finally:
        pool.close()
    for warm, end, worst in results:
        assert end - warm < 4 << 20
        assert worst < 1e-3
