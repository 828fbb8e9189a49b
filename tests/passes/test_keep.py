"""Parameters that forward keeps gathered for backward, if ``reshard_after_forward`` is None.

Ranks exchange messages: in shared memory, gathering again costs nothing.
"""

import pytest
import torch
from support.models import assert_same_step, batch_of, optimizers_of, shard
from torch import nn

from deepcompile_zero3 import record_collectives

ALL = {"0.weight", "2.weight", "4.weight"}


def _gathered_again(keep_mb, choices):
    """Returns the weights that a backward gathers; compares steps with one process."""
    layers = [nn.Linear(256, 256, bias=False) for _ in range(3)]  # 256 KiB each
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    model, reference = shard(model, layers, transport="c10d")
    for layer, choice in choices.items():
        model[layer].set_reshard_after_forward(choice)
    options = {"inductor": False} | ({} if keep_mb is None else {"keep_mb": keep_mb})
    run = torch.compile(model, backend="zero3", options=options)
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        batch = batch_of(4, 256, seed=seed).requires_grad_()  # so that backward needs all weights
        with record_collectives() as log:
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        gathered = [fqn for c in log if c.op == "all_gather" for fqn in c.params]
        assert set(gathered) == ALL
    return {fqn for fqn in ALL if gathered.count(fqn) == 2}


@pytest.mark.parametrize(
    ("keep_mb", "choices", "expected"),
    [
        (None, {}, set()),
        pytest.param(float("inf"), {}, set(), marks=pytest.mark.long),
        (0, {}, ALL),
        (0.25, {}, {"0.weight", "2.weight"}),  # the last layer is held for the shortest time
        pytest.param(0.6, {}, {"0.weight"}, marks=pytest.mark.long),
        pytest.param(0.25, {4: True}, {"0.weight", "4.weight"}, marks=pytest.mark.long),
        (0.25, {0: False}, {"2.weight"}),  # weights that the user keeps do not use the budget,
        (0.25, {4: False}, {"0.weight"}),  # even if backward needs them first
        (0, {0: False, 2: True}, {"2.weight", "4.weight"}),
    ],
)
def test_forward_keeps_what_fits_and_never_overrules(run_ranks, keep_mb, choices, expected):
    for again in run_ranks(2, _gathered_again, keep_mb, choices):
        assert again == expected


class _Block(nn.Sequential):
    def forward(self, x):  # torch 2.11 compiles no module whose forward is torch's
        return super().forward(x)


def _kept_block_by_block(depth, holds_first):
    def linear():
        return nn.Linear(256, 256, bias=False)  # 256 KiB

    blocks = [_Block(linear(), nn.Tanh(), linear(), nn.Tanh()) for _ in range(depth)]
    model, reference = shard(nn.Sequential(*blocks), blocks, transport="c10d")
    for block in blocks:
        block.compile(backend="zero3", options={"keep_mb": 1.0, "inductor": False})
    if holds_first:
        blocks[0].set_reshard_after_forward(False)
    kept = []
    for rows in (4, 4, 6, 8):  # the third size compiles again
        with record_collectives() as log:
            assert_same_step(model, reference, batch_of(rows, 256).requires_grad_())
            model.zero_grad()
            reference.zero_grad()
        gathered = [fqn for c in log if c.op == "all_gather" for fqn in c.params]
        kept.append({fqn for fqn in gathered if gathered.count(fqn) == 1})
    return kept


@pytest.mark.parametrize("depth", [3, pytest.param(6, marks=pytest.mark.long)])
def test_the_graphs_of_a_model_share_what_may_be_kept(run_ranks, depth):
    # Each block's part of the budget, by bytes, holds one of its two weights, or none.
    for kept in run_ranks(2, _kept_block_by_block, depth, False):
        assert kept == [{f"{block}.2.weight" for block in range(depth) if depth < 5}] * 4


def test_parameters_kept_by_the_user_take_nothing_from_keep_mb(run_ranks):
    for kept in run_ranks(2, _kept_block_by_block, 4, True):
        assert kept == [{"0.0.weight", "0.2.weight", "1.2.weight", "2.2.weight", "3.2.weight"}] * 4
