"""Shared parts of the tests of faults: timeouts, moments of a step, ranks that die."""

import pytest
from support.ranks import RankPool

TIMEOUT = 3  # seconds; of a group in which a rank stands still
LONG = 60  # seconds; of a group whose timeout is not awaited
each_transport = pytest.mark.parametrize("transport", ["shared_memory", "c10d"])


def let(act, moment, model, optimizer):
    """Calls ``act()`` at a moment of each later step."""
    match moment:
        case "forward":
            model.blocks[1].register_forward_pre_hook(lambda *_: act())
        case "backward":

            def hook(module, args, output):
                output.register_hook(lambda _: act())

            model.blocks[0].register_forward_hook(hook)
        case "optimizer":
            optimizer.register_step_pre_hook(lambda *_: act())
        case "hook":
            model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda _: act())


def to_death(function, *args, world_size=2):
    """Runs ``function`` on new ranks, of which at least one fails, and returns their errors."""
    pool = RankPool(world_size)
    try:
        with pytest.raises(AssertionError) as raised:
            pool.run(function, *args, timeout=60)
    finally:
        pool.close()
    return str(raised.value)
