"""Every architecture that transformers shards by a plan of its own trains as with DDP.

Each model trains on two ranks, is saved half way with its optimizer, loaded, and trains on. DDP
takes the same steps without a break. Adam hides the scale of gradients, so their norms are compared
too. `python tests/test_transformers_plans.py` prints what comes of it, here and with torch's own
``fully_shard``.
"""

import argparse
import collections
import contextlib
import itertools
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from models import INDUCTOR_TOO, compiled, join_as_torchrun, mine
from ranks import RankPool
from torch.nn.parallel import DistributedDataParallel
from transformer_models import text
from transformer_plans import NOT_SMALL, architectures, class_of, small_model

from deepcompile_zero3 import Zero3Module, shard_in_transformers

fsdp = pytest.importorskip("transformers.distributed.fsdp")
checkpoint = pytest.importorskip("transformers.distributed.checkpoint")

STEPS = 20
TOLERANCE = 1e-5
NAMES = [name for name in architectures() if name not in NOT_SMALL]

# Dense, with experts, with state-space layers, with linear attention, with two kinds of attention.
THROUGH_INDUCTOR = (
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "BambaForCausalLM",
    "Qwen3NextForCausalLM",
    "Gemma3ForCausalLM",
    "DeepseekV3ForCausalLM",
)


def _steps(model, run, optimizer, batch, steps):
    """Returns the loss and the norm of the gradients of each step."""
    model.train()
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        values.append((loss.item(), norm.item()))
    return values


def _adam(model):
    return torch.optim.Adam(model.parameters(), lr=3e-4)


def _with_ddp(name, tied, batch):
    model = small_model(name, tied)
    run = DistributedDataParallel(model, find_unused_parameters=True)
    return _steps(model, run, _adam(model), batch, STEPS)


def _with_a_break(name, tied, batch, how, folder):
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=dist.get_world_size())
    whole, half, moments = (os.path.join(folder, part) for part in ("whole", "half", "moments"))
    if dist.get_rank() == 0:
        small_model(name, tied).save_pretrained(whole)
    dist.barrier()

    def loaded(path):
        with contextlib.nullcontext() if how == "fsdp2" else shard_in_transformers():
            model = class_of(name).from_pretrained(path, distributed_config=config)
        assert isinstance(model, Zero3Module) == (how != "fsdp2")
        return model, compiled(model, "eager" if how == "fsdp2" else how), _adam(model)

    model, run, optimizer = loaded(whole)
    values = _steps(model, run, optimizer, batch, STEPS // 2)
    model.save_pretrained(half)
    checkpoint.save_optimizer_distributed(model, optimizer, moments)
    dist.barrier()
    model, run, optimizer = loaded(half)
    checkpoint.load_optimizer_distributed(model, optimizer, moments)
    return values + _steps(model, run, optimizer, batch, STEPS - STEPS // 2)


def _differences(name, tied, how, folder):
    """Returns by how much losses and norms of gradients differ from DDP's at most."""
    join_as_torchrun()
    batch = {key: mine(rows) for key, rows in text(4, seed=0).items()}
    expected = torch.tensor(_with_ddp(name, tied, batch))
    actual = torch.tensor(_with_a_break(name, tied, batch, how, folder))
    assert actual.isfinite().all()
    differences = (actual - expected).abs()
    differences[:, 1] /= expected[:, 1]
    return differences.amax(0).tolist()


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for how in ("eager", "interpreted") for name in NAMES]
    + [pytest.param(name, "zero3", marks=INDUCTOR_TOO) for name in THROUGH_INDUCTOR],
)
def test_an_architecture_trains_by_its_plan_as_with_ddp(run_ranks, tmp_path, name, how, tied):
    for loss, norm in run_ranks(2, _differences, name, tied, how, str(tmp_path), timeout=300):
        assert loss <= TOLERANCE
        assert norm <= 10 * TOLERANCE


def _outcome(pool, name, tied, how):
    """Returns "same", "wrong numbers" or "error", and details."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            values = pool.run(_differences, name, tied, how, folder, timeout=120)
        except AssertionError as error:
            return "error", str(error).strip().splitlines()[-1]
    loss, norm = map(max, zip(*values, strict=True))
    same = loss <= TOLERANCE and norm <= 10 * TOLERANCE
    return "same" if same else "wrong numbers", f"loss {loss:.0e}, norm {norm:.0e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", nargs="*", default=["eager", "fsdp2"])
    parser.add_argument("--names", nargs="*", default=NAMES)
    arguments = parser.parse_args()
    pool, counts = RankPool(2), collections.Counter()
    for how, name, tied in itertools.product(arguments.how, arguments.names, (False, True)):
        outcome, details = _outcome(pool, name, tied, how)
        counts[how, outcome] += 1
        print(how, name, "tied" if tied else "untied", outcome, details, sep="  ", flush=True)
    for (how, outcome), count in counts.items():
        print(f"{how}: {count} {outcome}")
    pool.close()


if __name__ == "__main__":
    main()
