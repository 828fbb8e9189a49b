"""``python -m deepcompile_zero3 digest`` names the first difference between two runs."""

import pytest
import torch
import torch.distributed as dist
from support.command_line import call
from support.models import batch_of, mean_square, mine, shard_stack

from deepcompile_zero3 import DigestLog
from deepcompile_zero3.__main__ import main
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.module_parameters import registered_in

STEPS = 4


def _train(path, where=None, at=None, steps=STEPS, every=1):
    """Trains, and, if told to, flips a bit of one element of the second rank before a digest, or
    sums the gradients of a parameter in bfloat16 from a step on.
    """
    torch.manual_seed(0)
    model, _ = shard_stack()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    log = DigestLog(path, model, optimizer, every=every)
    for step in range(1, steps + 1):
        if step == at and where == "sum":
            (summed,) = [p for p in registered_in(model) if p.fqn == "blocks.1.up.weight"]
            settings = summed.settings
            dtypes = settings.gradient_dtypes
            dtypes = _C.GradientDtypes(dtypes.leaf, torch.bfloat16, dtypes.shard)
            summed.settings = settings.replace(gradient_dtypes=dtypes)
        mean_square(model, mine(batch_of(4, 8, seed=step))).backward()
        weight = model.blocks[1].up.weight
        changes_gradient = step == at and where == "gradient"
        if changes_gradient and dist.get_rank() == 1:
            weight.grad.to_local().view(torch.int32)[-1, -1] ^= 1 << 20
        optimizer.step()
        changed = {"shard": weight.detach(), "state": optimizer.state[weight]["exp_avg"]}
        if step == at and where in changed and dist.get_rank() == 1:
            changed[where].to_local().view(torch.int32)[-1, -1] ^= 1
        log.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("gradient", "the gradient of 'blocks.1.up.weight'"),
        ("sum", "the gradient of 'blocks.1.up.weight'"),
        ("state", "the state 'exp_avg' of 'blocks.1.up.weight'"),
        ("shard", "the shard of 'blocks.1.up.weight'"),
    ],
)
def test_a_bit_of_one_rank_or_another_sum_is_found(run_ranks, tmp_path, where, what):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    run_ranks(2, _train, a)
    run_ranks(2, _train, b, where, 3)

    found = call(main, "digest", a, b)

    assert found.returncode == 1
    assert f"the runs differ first at step 3, in {what}:" in found.stdout
    first_counts = {
        "gradient": "1 of 14 gradients, 2 of 42 states, 1 of 14 shards",
        "sum": "1 of 14 gradients, 2 of 42 states, 1 of 14 shards",
        "state": "0 of 14 gradients, 1 of 42 states, 0 of 14 shards",
        "shard": "0 of 14 gradients, 0 of 42 states, 1 of 14 shards",
    }
    assert f"at step 3 {first_counts[where]} differ" in found.stdout


def test_runs_of_equal_bits_are_alike(run_ranks, tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    run_ranks(2, _train, a)
    run_ranks(2, _train, b, None, None, STEPS - 1)

    found = call(main, "digest", a, b)

    assert found.returncode == 0
    assert found.stdout == "only RUN_A has step 4\nalike in all 3 steps that both have, 1 to 3\n"


def _log_of(path, model, every=1):
    log = DigestLog(path, model, every=every)
    for _ in range(4):
        log.step()


def test_other_names_differ(tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    _log_of(a, torch.nn.Linear(2, 2, bias=False))
    _log_of(b, torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)))

    found = call(main, "digest", a, b)

    assert found.returncode == 1
    assert "in the shard of 'weight':" in found.stdout
    assert "missing in RUN_B" in found.stdout
    assert "2 of 2 shards differ" in found.stdout


def test_other_numbers_of_ranks_are_mentioned(run_ranks, tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    torch.manual_seed(0)
    _log_of(a, torch.nn.Linear(2, 2))
    b.write_text(a.read_text().replace('"ranks": 1', '"ranks": 8'))

    found = call(main, "digest", a, b)

    assert found.returncode == 0
    assert "ranks: 1 in RUN_A, 8 in RUN_B" in found.stdout


def test_bad_input_is_told_from_a_difference(tmp_path):
    run, others, text = (tmp_path / name for name in ("run.jsonl", "others.jsonl", "text"))
    _log_of(run, torch.nn.Linear(2, 2))
    _log_of(others, torch.nn.Linear(2, 2), every=5)
    text.write_text("step 10\n")

    for a, message in (
        (tmp_path / "missing", "No such file"),
        (text, "line 1 of"),
        (others, "has no digest of a step"),
    ):
        found = call(main, "digest", a, run)
        assert found.returncode == 2
        assert message in found.stderr, found.stderr

    _log_of(others, torch.nn.Linear(2, 2), every=3)
    _log_of(text.with_suffix(".jsonl"), torch.nn.Linear(2, 2), every=4)
    found = call(main, "digest", others, text.with_suffix(".jsonl"))
    assert found.returncode == 2
    assert "no step in common: RUN_A has step 3, RUN_B has step 4" in found.stderr
