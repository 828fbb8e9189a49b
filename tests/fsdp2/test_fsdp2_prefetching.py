"""Hints of which modules to gather ahead, as FSDP2 takes them."""

import pytest
import torch
from support.fsdp2_scenarios import gathered_in
from support.job import needs_a_job
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_step,
    batch_of,
    compiled,
    compiled_each_way,
    either_transport,
    gathered_fqns,
    layers_of,
    mean_square,
    mine,
    optimizers_of,
    shard,
    step,
)

from deepcompile_zero3 import fully_shard, record_collectives


class Skipping(Stack):
    """A stack that skips its last block on request."""

    def forward(self, x, skip=False):
        for block in self.blocks[:-1] if skip else self.blocks:
            x = block(x)
        return self.head(x)


def _blocks_gathered_in(log):
    return {fqn.removesuffix(".up.weight") for fqn in gathered_in(log) if "up.weight" in fqn}


def _prefetched(transport):
    model = Skipping(depth=3)
    model, reference = shard(model, model.blocks, transport=transport)
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    optimizers = optimizers_of(model, reference)
    logs, seen = [], []
    see = lambda *_: seen.append(_blocks_gathered_in(logs[-1]))  # noqa: E731
    first.register_forward_hook(see)

    def see_its_gradient(module, args, output):
        if output.requires_grad:  # after the third block's backward, before the second's
            output.register_hook(see)

    second.register_forward_hook(see_its_gradient)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        for part in ("forward", "backward", "evaluation"):
            with record_collectives() as log:
                logs.append(log)
                if part == "forward":
                    loss = mean_square(model, mine(batch))
                elif part == "backward":
                    loss.backward()
                else:
                    with torch.no_grad():
                        model(batch, skip=True)  # prefetched in vain, soon stale
        mean_square(reference, batch).backward()
        assert_same_gradients(model, reference)
        step(optimizers)
        assert_same_parameters(model, reference)
        assert gathered_fqns(model) == []
    return seen


@either_transport
def test_hinted_blocks_are_gathered_ahead_in_eager_code(run_ranks, transport):
    every = {"blocks.0", "blocks.1", "blocks.2"}
    for seen in run_ranks(2, _prefetched, transport):
        assert seen == 2 * [every, every, every]


def _ignored_when_compiled(how):
    model = Stack()
    model, reference = shard(model, model.blocks)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    run = compiled(model, how)
    assert_same_step(model, reference, batch_of(4, 8), run=run)


@compiled_each_way
def test_hints_do_not_disturb_a_compiled_step(run_ranks, how):
    run_ranks(2, _ignored_when_compiled, how)


@needs_a_job
def test_only_sharded_modules_can_be_prefetched():
    model = fully_shard(layers_of(2, 2))
    for method in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
        with pytest.raises(ValueError, match="Zero3Linear was not sharded: call fully_shard"):
            method([model[0]])


@needs_a_job
def test_a_hint_does_not_end_an_unshard():
    model = layers_of(2, 2, 2)
    first, second = model
    for block in model:
        fully_shard(block)
    fully_shard(model)
    first.set_modules_to_forward_prefetch([second])
    handle = second.unshard(async_op=True)
    first(torch.ones(1, 2))
    handle.wait()
    assert type(second.weight) is torch.Tensor
    second.reshard()
    first(torch.ones(1, 2))
    assert gathered_fqns(model) == []
