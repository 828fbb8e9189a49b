"""``FileOffloadPolicy``: what exceeds a budget of memory is in a file, and no number changes."""

import contextlib
import copy
import math
import os
import re
import resource

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import Stack, batch_of, compiled, each_way, either_transport, mean_square, mine
from one_rank import one_rank  # noqa: F401
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import (
    FileOffloadPolicy,
    Zero3Error,
    capture_graphs,
    fully_shard,
    offload_optimizer,
    step_in_backward,
    step_locally,
)
from deepcompile_zero3.runtime import _C

WIDTH, DEPTH, ROWS = 256, 3, 256  # an activation [ROWS, WIDTH] takes 256 KiB, and may go
MIB = 2**20


def _shard(policy, depth=DEPTH, **settings):
    torch.manual_seed(0)
    model = Stack(width=WIDTH, depth=depth)
    if policy is not None:
        settings["offload_policy"] = policy
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def _train(policy, how, steps=3, stepping="plain", **settings):
    """Returns the model, its optimizer and the losses of some steps."""
    model = _shard(policy, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if stepping == "locally":
        step_locally(optimizer)
    if policy is not None:
        offload_optimizer(model, optimizer, part_mb=0.5)
    if stepping == "in backward":
        step_in_backward(model, optimizer, bucket_mb=0.5)
    run = compiled(model, how)
    losses = []
    for seed in range(steps):
        loss = mean_square(run, mine(batch_of(2 * ROWS, WIDTH, seed=seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


def _tensors(model, optimizer):
    """Returns the local tensors of shards, and of states that have their size."""
    shards = [parameter.to_local() for parameter in model.parameters()]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return shards, [value.to_local() for value in states if isinstance(value, DTensor)]


def _compare(folder, how, stepping, budget_mb, transport):
    settings = {"stepping": stepping, "transport": transport}
    *expected, losses = _train(None, how, **settings)
    policy = FileOffloadPolicy(folder, budget_mb)
    *actual, offloaded_losses = _train(policy, how, **settings)
    assert offloaded_losses == losses
    for tensors, theirs in zip(_tensors(*actual), _tensors(*expected), strict=True):
        assert all(map(torch.equal, tensors, theirs))
    return policy.stats()


@pytest.mark.parametrize("stepping", ["plain", "locally", "in backward"])
@pytest.mark.parametrize("budget_mb", [0, 3])
@each_way
def test_no_bit_changes(run_ranks, tmp_path, how, budget_mb, stepping):
    for stats in run_ranks(2, _compare, str(tmp_path), how, stepping, budget_mb, "shared_memory"):
        assert stats.written > 0
        assert stats.read > 0
    assert not os.listdir(tmp_path)


def test_no_bit_changes_where_ranks_send_messages(run_ranks, tmp_path):
    run_ranks(2, _compare, str(tmp_path), "interpreted", "plain", 0, "c10d")


@pytest.mark.inductor
def test_no_bit_changes_through_inductor(run_ranks, tmp_path):
    run_ranks(2, _compare, str(tmp_path), "zero3", "plain", 0, "c10d")


def _kinds_in_file(folder, budget_mb):
    """Returns how many activations a forward stores, and how many shards and states are stored."""
    policy = FileOffloadPolicy(folder, budget_mb)
    with capture_graphs() as graphs:
        model, optimizer, _ = _train(policy, "interpreted", steps=1)
    shards, states = _tensors(model, optimizer)
    [forward] = graphs.forward
    stored = forward.text.count("zero3.store_start")
    assert stored == graphs.backward[0].text.count("zero3.load_start")
    return stored, *(sum(map(_C.is_in_file, tensors)) for tensors in (shards, states))


def test_the_cheapest_goes_first(run_ranks, tmp_path):
    def kinds(budget_mb):
        return run_ranks(2, _kinds_in_file, str(tmp_path), budget_mb)[0]

    # Of each rank: buckets of 9.8 MiB, shards and gradients of 1.6 MiB each, states of 3.3 MiB, and
    # saved activations of 4.5 MiB at least.
    assert kinds(30) == (0, 0, 0)
    some, *others = kinds(18)
    assert some > 0
    assert others == [0, 0]
    most, shards, states = kinds(14)
    assert most > some
    assert shards == 0
    assert states > 0
    every, shards, more_states = kinds(0)
    assert every == most
    assert shards > 0
    assert more_states > states


def _pages(folder):
    """Returns the bytes of files in ``folder`` that this process has in memory."""
    total, is_ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                is_ours = folder in line
            elif is_ours and line.startswith("Rss:"):
                total += 1024 * int(line.split()[1])
    return total


def _leaves_memory(folder):
    policy = FileOffloadPolicy(folder)
    _model, optimizer, _ = _train(policy, "interpreted")
    assert policy.stats().in_use > 4 * MIB
    assert _pages(folder) == 0
    states = [state["exp_avg"].to_local() for state in optimizer.state.values()]
    max(states, key=torch.numel).sum()
    assert _pages(folder) > 0


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")
def test_pages_leave_the_process(run_ranks, tmp_path):
    run_ranks(2, _leaves_memory, str(tmp_path))


def _space(folder):
    policy = FileOffloadPolicy(folder)
    model = _shard(policy)
    run = compiled(model, "interpreted")
    sizes = []
    for _ in range(4):
        mean_square(run, batch_of(ROWS, WIDTH)).backward()
        stats = policy.stats()
        sizes.append((stats.file_bytes, stats.in_use))
    assert sizes[1:] == sizes[:1] * 3  # what a step leaves, the next one takes
    output = run(batch_of(ROWS, WIDTH))
    assert policy.stats().in_use > sizes[-1][1]
    del output
    assert policy.stats().in_use == sizes[-1][1]


def test_space_is_used_again(run_ranks, tmp_path):
    run_ranks(2, _space, str(tmp_path))


def _backward_twice(folder):
    policy = FileOffloadPolicy(folder)
    model = _shard(policy)
    loss = mean_square(compiled(model, "interpreted"), batch_of(ROWS, WIDTH))
    loss.backward(retain_graph=True)
    once = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    loss.backward()
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad.to_local(), 2 * gradient)


def test_a_graph_that_is_retained_loads_twice(run_ranks, tmp_path):
    run_ranks(2, _backward_twice, str(tmp_path))


def _with_hooks(folder):
    gradients = []
    for hooks in (
        contextlib.nullcontext(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda saved: saved.clone() if _C.is_in_file(saved) else saved, lambda saved: saved
        ),
    ):
        model = _shard(FileOffloadPolicy(folder))
        run = compiled(model, "interpreted")
        with hooks:
            loss = mean_square(run, batch_of(ROWS, WIDTH))
        loss.backward()
        gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_hooks_on_saved_tensors_may_put_them_elsewhere(run_ranks, tmp_path):
    run_ranks(2, _with_hooks, str(tmp_path))


def _checkpoint(folder):
    model, optimizer, _ = _train(FileOffloadPolicy(f"{folder}/tier"), "interpreted")
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=f"{folder}/saved")
    expected = [[each.detach().clone() for each in kind] for kind in _tensors(model, optimizer)]
    policy = FileOffloadPolicy(f"{folder}/tier")
    model, optimizer, _ = _train(policy, "interpreted", steps=1)
    found = get_state_dict(model, optimizer)
    dcp.load({"model": found[0], "optimizer": found[1]}, checkpoint_id=f"{folder}/saved")
    model.load_state_dict(found[0])
    optimizer.load_state_dict(
        {
            **optimizer.state_dict(),
            "state": {
                number: found[1]["state"][name]
                for number, (name, _) in enumerate(model.named_parameters())
            },
        }
    )
    for tensors, others in zip(_tensors(model, optimizer), expected, strict=True):
        assert all(map(torch.equal, tensors, others))
    mean_square(model, batch_of(ROWS, WIDTH)).backward()
    optimizer.step()
    shards, states = _tensors(model, optimizer)
    assert all(_C.is_in_file(tensor) for tensor in states if tensor.nbytes >= 64 * 1024)
    assert all(map(_C.is_in_file, shards))
    assert get_optimizer_state_dict(model, optimizer)


def test_checkpoints_have_what_is_in_the_file(run_ranks, tmp_path):
    (tmp_path / "tier").mkdir()
    run_ranks(2, _checkpoint, str(tmp_path))


def _resume(folder, policy):
    """Returns the losses of some steps after a state dict has made the states, as a resume does."""
    model = _shard(policy)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step_locally(optimizer)
    if policy is not None:
        offload_optimizer(model, optimizer, part_mb=0.5)
    get_optimizer_state_dict(model, optimizer)
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


@pytest.mark.usefixtures("one_rank")
def test_alike_models_with_other_policies_have_graphs_of_their_own(tmp_path):
    policies = FileOffloadPolicy(tmp_path), FileOffloadPolicy(tmp_path, 10_000), None
    activations = []
    for policy in policies:
        model = _shard(policy)
        run = compiled(model, "interpreted")
        output = mean_square(run, batch_of(ROWS, WIDTH))
        stats = [each.stats().in_use for each in policies[:2]]
        output.backward()
        after = [each.stats().in_use for each in policies[:2]]
        activations.append([before - now for before, now in zip(stats, after, strict=True)])
    assert activations[0][0] > 0
    assert [activations[0][1], *activations[1], *activations[2]] == [0] * 5


@pytest.mark.usefixtures("one_rank")
def test_one_policy_may_serve_several_models(tmp_path):
    policy = FileOffloadPolicy(tmp_path, 1000)
    models = [_shard(copy.deepcopy(policy)) for _ in range(2)]
    for model in models:
        model(batch_of(ROWS, WIDTH))
    shards = [parameter.to_local() for model in models for parameter in model.parameters()]
    assert not any(map(_C.is_in_file, shards))
    late = _shard(policy)
    late(batch_of(ROWS, WIDTH))
    assert all(_C.is_in_file(parameter.to_local()) for parameter in late.parameters())


def _states_in_memory(folder, budget_mb, stepping):
    model, optimizer, _ = _train(
        FileOffloadPolicy(folder, budget_mb), "eager", steps=2, stepping=stepping
    )
    return sum(
        state.nbytes
        for state in _tensors(model, optimizer)[1]
        if state.nbytes >= 64 * 1024 and not _C.is_in_file(state)
    )


@pytest.mark.parametrize("stepping", ["plain", "in backward"])
def test_states_stay_within_the_budget(run_ranks, tmp_path, stepping):
    # Shards take 1.6 MiB, so do gradients unless they are stepped in backward, and buckets.
    buckets = 9.8 if stepping == "plain" else 6.6 + 0.5
    room = 1.0
    budget = buckets + (2 if stepping == "plain" else 1) * 1.64 + room
    for nbytes in run_ranks(2, _states_in_memory, str(tmp_path), budget, stepping):
        assert 0 < nbytes <= 1.2 * room * MIB


@pytest.mark.usefixtures("one_rank")
def test_a_full_disk_ends_a_step_once_all_parameters_are_stepped(tmp_path):
    policy = FileOffloadPolicy(tmp_path)
    model = _shard(policy)
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


@pytest.mark.usefixtures("one_rank")
def test_the_first_forward_may_be_in_inference_mode(tmp_path):
    model = _shard(FileOffloadPolicy(tmp_path))
    with torch.inference_mode():
        model(batch_of(ROWS, WIDTH))
    for parameter in model.parameters():
        assert _C.is_in_file(parameter.to_local())
        with torch.no_grad():
            parameter.to_local().mul_(0.5)


def _meta(folder):
    policy = FileOffloadPolicy(folder)
    with torch.device("meta"):
        model = Stack(width=WIDTH, depth=1)
    fully_shard(model, offload_policy=policy).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local(), std=0.1)
    mean_square(model, batch_of(ROWS, WIDTH)).backward()
    assert all(_C.is_in_file(parameter.to_local()) for parameter in model.parameters())


def test_a_model_from_meta_goes_at_its_first_forward(run_ranks, tmp_path):
    run_ranks(2, _meta, str(tmp_path))


@pytest.mark.usefixtures("one_rank")
def test_a_full_disk_raises_an_error(tmp_path):
    policy = FileOffloadPolicy(tmp_path)
    model = _shard(policy)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300 * 1024, before[1]))
    try:
        with pytest.raises(Zero3Error, match=rf"offloading to '{tmp_path}': taking \d+ bytes"):
            model(batch_of(ROWS, WIDTH))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    mean_square(model, batch_of(ROWS, WIDTH)).backward()  # goes on, once there is space
    assert all(_C.is_in_file(parameter.to_local()) for parameter in model.parameters())


@pytest.mark.usefixtures("one_rank")
def test_a_full_disk_interrupts_a_graph(tmp_path):
    policy = FileOffloadPolicy(tmp_path)
    model = _shard(policy)
    run = compiled(model, "interpreted")
    with torch.no_grad():
        run(batch_of(ROWS, WIDTH))  # takes the shards' space
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (policy.stats().file_bytes, before[1]))
    try:
        with pytest.raises(Zero3Error, match="Free space, name another folder, or give a larger"):
            run(batch_of(ROWS, WIDTH))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    mean_square(run, batch_of(ROWS, WIDTH)).backward()


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="memory_budget_mb is a number of MiB of at least 0"):
        FileOffloadPolicy(tmp_path, -1)
    with pytest.raises(ValueError, match="got inf"):
        FileOffloadPolicy(tmp_path, math.inf)
    with pytest.raises(ValueError, match="got 'much'"):
        FileOffloadPolicy(tmp_path, "much")
    with pytest.raises(Zero3Error, match=r"no file for offloading can be made in .*No such file"):
        FileOffloadPolicy(tmp_path / "missing")


@pytest.mark.usefixtures("one_rank")
def test_a_model_has_one_budget(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], offload_policy=FileOffloadPolicy(tmp_path))
    with pytest.raises(ValueError, match=r"another offload_policy than for .*weight'"):
        fully_shard(model, offload_policy=FileOffloadPolicy(tmp_path))


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


def _starts_before_waits(text):
    """Returns how many loads have started, at most, before one of them is waited for."""
    started, most = 0, 0
    for line in text.splitlines():
        started += "zero3.load_start" in line
        started -= "zero3.load_wait" in line
        most = max(most, started)
    return most


@either_transport
def test_graphs_that_offload(run_ranks, tmp_path, transport):
    for forward, backward in run_ranks(2, _graphs, str(tmp_path), transport):
        assert _starts_before_waits(backward) > 1
        starts = re.findall(r"(\w+): .* = zero3.store_start\(", forward)
        waits = re.findall(r"zero3.store_wait\((\w+), \w+(?:, (\w+))?\)", forward)
        assert len(starts) == len(waits) > 4
        for start, later in waits:  # two more have started before one is waited for
            expected = min(starts.index(start) + 2, len(starts) - 1)
            assert later == (starts[expected] if starts[expected] != start else "")


def _graphs(folder, transport):
    model = _shard(FileOffloadPolicy(folder), transport=transport)
    with capture_graphs() as graphs:
        mean_square(compiled(model, "interpreted"), batch_of(ROWS, WIDTH)).backward()
    return graphs.forward[0].text, graphs.backward[0].text
