"""A training loop in torchtitan's style: initialized in shards, checkpointed blocks, resuming."""

import copy
import importlib.util
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.paths import EXAMPLES
from torch import nn
from torch.testing import assert_close

from deepcompile_zero3 import capture_graphs, record_collectives

EXAMPLE = EXAMPLES / "pretrain.py"
HOW = {"eager": None, "interpreted": {"options": {"inductor": False}}}


def _example():
    """Returns the example as a module that Dynamo finds by its name."""
    spec = importlib.util.spec_from_file_location("pretrain", EXAMPLE)
    sys.modules["pretrain"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _training(example, how):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        return example.Training(param_dtype=torch.float32, compiled=HOW[how])


def _whole(example, training):
    """Returns one process's model and optimizer of the same values."""
    reference = example.Transformer()
    state = {
        fqn: value.full_tensor() for fqn, value in training.parts()["model"].state_dict().items()
    }
    reference.load_state_dict(state)
    return reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)


def _expected(example, number, reference, optimizer, schedule):
    """Takes step ``number`` with the batches of all ranks; returns the loss."""
    losses = []
    for micro in (2 * number, 2 * number + 1):
        tokens = torch.cat([example.batch(micro, rank) for rank in range(dist.get_world_size())])
        loss = example.loss_of(reference, tokens) / 2
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return sum(losses)


def _values(training):
    """Returns this rank's shards and moments."""
    state, moments = training.optimizer.state, ("exp_avg", "exp_avg_sq")
    return copy.deepcopy(
        [
            [
                p.to_local().detach(),
                *(state[p][key].to_local() for key in moments),
            ]
            for p in training.model.parameters()
        ]
    )


def _pretrain(how, folder):
    example = _example()
    training = _training(example, how)
    reference, optimizer = _whole(example, training)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, example.warm_up)
    losses = []
    with capture_graphs() as graphs:
        for number in range(4):
            with record_collectives() as log:
                losses.append(training.step())
            expected = _expected(example, number, reference, optimizer, schedule)
            assert_close(losses[-1], expected, rtol=1e-5, atol=0)
            names = sorted(fqn for c in log if c.op == "reduce_scatter" for fqn in c.params)
            assert names == sorted(fqn for fqn, _ in training.model.named_parameters())
            if number == 1:
                dcp.save(training.parts(), checkpoint_id=folder)
    for fqn, shard in training.parts()["model"].state_dict().items():
        assert_close(shard.full_tensor(), reference.state_dict()[fqn], rtol=1e-5, atol=1e-6)
    assert len(graphs.backward) == (how != "eager")  # one for all blocks

    torch.manual_seed(9)
    again = _training(example, how)
    dcp.load(again.parts(), checkpoint_id=folder)
    assert again.done == 2
    for loss in losses[2:]:
        assert torch.equal(again.step(), loss)
    assert_close(_values(again), _values(training), rtol=0, atol=0)


@pytest.mark.first(how="interpreted")
@pytest.mark.parametrize("how", HOW)
def test_the_example_trains_as_one_process_and_goes_on(run_ranks, tmp_path, how):
    run_ranks(2, _pretrain, how, str(tmp_path))
