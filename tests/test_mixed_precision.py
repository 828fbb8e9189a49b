"""Mixed precision, step by step beside torch's own FSDP2."""

import copy
import itertools

import pytest
import torch
from models import Stack, batch_of, compiled, mine
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepcompile_zero3 import fully_shard, record_collectives

CHOICES = [None, torch.float32, torch.bfloat16]
OPS = {"all_gather", "reduce_scatter"}


class _DtypesOnTheWire(TorchDispatchMode):
    """What c10d is asked for: sets of dtypes by op, as far as the calling thread is concerned."""

    def __init__(self):
        super().__init__()
        self.dtypes = {op: set() for op in OPS}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d."):
            for op in OPS:
                if op.replace("_", "") in name.replace("_", ""):
                    self.dtypes[op] |= {t.dtype for t in tree_leaves(args) if hasattr(t, "dtype")}
        return func(*args, **(kwargs or {}))


def _sharded(model, shard, policy, output_dtype):
    model = copy.deepcopy(model)
    for block in model.blocks:
        shard(block, mp_policy=MixedPrecisionPolicy(**policy))
    return shard(model, mp_policy=MixedPrecisionPolicy(**policy, output_dtype=output_dtype))


def _train(model, run, dtype):
    """Losses, dtypes of output and gradients, over ten steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, dtypes = [], set()
    for step in range(10):
        output = run(mine(batch_of(8, 8, seed=step)).to(dtype))
        loss = output.float().square().mean()
        loss.backward()
        dtypes.add((output.dtype, frozenset(p.grad.dtype for p in model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dtypes


def _beside_fsdp2(dtype, how, policies):
    for param, reduce, output in policies:
        where = f"{param=} {reduce=} {output=}"
        policy = {"param_dtype": param, "reduce_dtype": reduce}
        torch.manual_seed(0)
        whole = Stack(depth=1).to(dtype)

        theirs = _sharded(whole, fsdp2, policy, output)
        with _DtypesOnTheWire() as wire:
            losses, dtypes = _train(theirs, theirs, dtype)

        torch._dynamo.reset()
        ours = _sharded(whole, fully_shard, policy, output)
        with record_collectives() as log:
            our_losses, our_dtypes = _train(ours, compiled(ours, how), dtype)

        assert our_dtypes == dtypes, where
        for op in OPS:
            assert wire.dtypes[op], "nothing was seen"
            assert {c.dtype for c in log if c.op == op} == wire.dtypes[op], (where, op)
        torch.testing.assert_close(our_losses, losses, rtol=1e-5, atol=0, msg=where)


def _pairs():
    """Policies in which each two of the choices meet."""
    n = len(CHOICES)
    return [(CHOICES[i], CHOICES[j], CHOICES[(i + j) % n]) for i in range(n) for j in range(n)]


@pytest.mark.parametrize(
    "policies",
    [_pairs(), pytest.param([*itertools.product(CHOICES, repeat=3)], marks=pytest.mark.long)],
    ids=["pairs", "all"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_dtypes_and_losses_are_those_of_fsdp2(run_ranks, dtype, how, policies):
    run_ranks(2, _beside_fsdp2, dtype, how, policies, timeout=400)
