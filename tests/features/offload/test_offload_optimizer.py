"""``offload_optimizer``: an optimizer steps part by part, with states in a file."""

import itertools
import os
import resource

import pytest
import torch
from support.models import batch_of, mean_square, mine
from support.offloading import MIB, ROWS, WIDTH, shard, tensors_of, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from deepcompile_zero3 import (
    FileOffloadPolicy,
    Zero3Error,
    fully_shard,
    offload_optimizer,
    step_in_backward,
    step_locally,
)
from deepcompile_zero3.runtime import _C


def _resume(folder, policy):
    """Returns the losses of some steps after a state dict has made the states, as a resume does."""
    model = shard(policy)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step_locally(optimizer)
    if policy is not None:
        offload_optimizer(model, optimizer, part_mb=0.5)
    get_optimizer_state_dict(model, optimizer)
    return _losses(model, optimizer)


def _losses(model, optimizer):
    losses = []
    for seed in range(3):
        loss = mean_square(model, mine(batch_of(2 * ROWS, WIDTH, seed=seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _resume_both(folder):
    assert _resume(folder, FileOffloadPolicy(folder)) == _resume(folder, None)


def test_states_may_be_there_before_the_first_forward(run_ranks, tmp_path):
    run_ranks(2, _resume_both, str(tmp_path))


_CALLS = {
    "step_locally": lambda model, optimizer: step_locally(optimizer),
    "offload_optimizer": lambda model, optimizer: offload_optimizer(model, optimizer, part_mb=0.5),
    "step_in_backward": lambda model, optimizer: step_in_backward(model, optimizer, bucket_mb=0.5),
    "scheduler": lambda model, optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
}


def _train_after(calls, policy):
    """Returns shards, states, losses and what hooks of the step have seen, after some steps."""
    model = shard(policy)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    made = {name: _CALLS[name](model, optimizer) for name in calls}
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([type(p) for p in optimizer.param_groups[0]["params"]])
    )
    losses = []
    for seed in range(2):
        loss = mean_square(model, mine(batch_of(2 * ROWS, WIDTH, seed=seed)))
        if "step_in_backward" in calls:
            loss.backward()
            optimizer.step()
        else:
            optimizer.step(lambda loss=loss: loss.backward())
        optimizer.zero_grad()
        if "scheduler" in made:
            made["scheduler"].step()
        losses.append(loss.item())
    return *tensors_of(model, optimizer), losses, seen


def _any_order(folder, calls):
    policy = FileOffloadPolicy(folder)
    in_memory = _train_after([call for call in calls if call != "offload_optimizer"], None)
    counts = []
    for order in itertools.permutations(calls):
        shards, states, losses, seen = _train_after(order, policy)
        assert losses == in_memory[2], order
        assert {kind for kinds in seen for kind in kinds} == {nn.Parameter}
        for ours, theirs in zip(shards + states, in_memory[0] + in_memory[1], strict=True):
            assert torch.equal(ours, theirs), order
        counts.append(len(seen))
    assert len(set(counts)) == 1
    return losses, counts[0]


@pytest.mark.parametrize(
    "third", [pytest.param(None, marks=pytest.mark.more), "scheduler", "step_in_backward"]
)
def test_a_step_may_be_made_local_and_in_parts_in_any_order(run_ranks, tmp_path, third):
    calls = [call for call in ("step_locally", "offload_optimizer", third) if call is not None]
    for losses, steps in run_ranks(2, _any_order, str(tmp_path), calls):
        assert losses[0] > losses[1]
        assert steps > 4  # of parts


_WITHOUT_RULES = {
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, 0.01),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, fused=True),
}


def _without_rules(name, policy):
    model = shard(policy)
    optimizer = _WITHOUT_RULES[name](model.parameters())
    if policy is not None:
        offload_optimizer(model, optimizer, part_mb=0.5)
    return _losses(model, optimizer)


def _both_without_rules(folder, name):
    assert _without_rules(name, FileOffloadPolicy(folder)) == _without_rules(name, None)


@pytest.mark.parametrize("name", _WITHOUT_RULES)
def test_parts_are_stepped_on_local_tensors_where_dtensor_has_no_rules(run_ranks, tmp_path, name):
    run_ranks(2, _both_without_rules, str(tmp_path), name)


def _states_in_memory(folder, budget_mb, stepping):
    model, optimizer, _ = train(
        FileOffloadPolicy(folder, budget_mb), "eager", steps=2, stepping=stepping
    )
    return sum(
        state.nbytes
        for state in tensors_of(model, optimizer)[1]
        if state.nbytes >= 64 * 1024 and not _C.is_in_file(state)
    )


@pytest.mark.parametrize("stepping", ["plain", "in backward"])
def test_states_stay_within_the_budget(run_ranks, tmp_path, stepping):
    # Shards take 1.6 MiB, and so do gradients unless they are stepped in backward. The rest are
    # gathered parameters, reduced gradients, activations on their way back, and a bucket's states.
    always = 6.6 + 6.6 + 3.3 if stepping == "plain" else 6.6 + 1.0 + 3.3 + 0.5
    room = 1.0
    budget = always + (2 if stepping == "plain" else 1) * 1.64 + room
    for nbytes in run_ranks(2, _states_in_memory, str(tmp_path), budget, stepping):
        assert 0 < nbytes <= 1.2 * room * MIB


@pytest.mark.usefixtures("one_rank")
def test_a_full_disk_ends_a_step_once_all_parameters_are_stepped(tmp_path):
    policy = FileOffloadPolicy(tmp_path)
    model = shard(policy)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    offload_optimizer(model, optimizer, part_mb=0.5)
    mean_square(model, batch_of(ROWS, WIDTH)).backward()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (policy.stats().file_bytes, before[1]))
    try:
        with pytest.raises(Zero3Error, match=r"taking \d+ bytes failed"):
            optimizer.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}
    optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def _anonymous():
    """Returns the bytes of memory of this process that is in no file."""
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_a_step_has_some_parts_in_memory_at_a_time(tmp_path, is_local):
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(16)]  # 4 MiB each, 8 of states
    model = fully_shard(nn.Sequential(*layers), offload_policy=FileOffloadPolicy(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if is_local:
        step_locally(optimizer)
    offload_optimizer(model, optimizer, part_mb=4)
    mean_square(model, batch_of(2, 1024)).backward()
    optimizer.step()
    peaks = []
    optimizer.register_step_post_hook(lambda *_: peaks.append(_anonymous()))
    at_rest = _anonymous()
    optimizer.step()
    assert len(peaks) == 16
    # All take 192 MiB, and three parts 36. malloc keeps some of what was freed.
    assert max(*peaks, _anonymous()) - at_rest < 96 * MIB


@pytest.mark.usefixtures("one_rank")
def test_a_step_that_raises_leaves_the_file_whole(tmp_path):
    model = shard(FileOffloadPolicy(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    offload_optimizer(model, optimizer, part_mb=0.1)
    mean_square(model, batch_of(ROWS, WIDTH)).backward()
    optimizer.step()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    calls = []

    def fail(*_):
        calls.append(None)
        if len(calls) == 2:
            raise KeyError("by a hook")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match="by a hook"):
        optimizer.step()
    handle.remove()
    changed = [
        not torch.equal(parameter.to_local(), was)
        for parameter, was in zip(model.parameters(), before, strict=True)
    ]
    assert changed[0]
    assert not all(changed)
    optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0, 3.0}


@pytest.mark.usefixtures("one_rank")
def test_optimizers_that_cannot_be_offloaded_are_refused(tmp_path):
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(Zero3Error, match="no parameter of the optimizer was sharded with"):
        offload_optimizer(model, optimizer)
    model = fully_shard(nn.Linear(4, 4), offload_policy=FileOffloadPolicy(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="part_mb is a positive number"):
        offload_optimizer(model, optimizer, part_mb=0)
    offload_optimizer(model, optimizer)
    with pytest.raises(Zero3Error, match="called twice on one AdamW"):
        offload_optimizer(model, optimizer)
    with pytest.raises(ValueError, match="may need several parameters at once"):
        offload_optimizer(model, torch.optim.LBFGS(model.parameters()))
