"""``FileOffloadPolicy``: what exceeds a budget of memory is in a file, and no number changes."""

import contextlib
import copy
import math
import os
import resource

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.models import Stack, batch_of, compiled, each_way, mean_square
from support.offloading import MIB, ROWS, WIDTH, shard, tensors_of, train
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict

from deepcompile_zero3 import FileOffloadPolicy, Zero3Error, fully_shard
from deepcompile_zero3.runtime import _C


def _compare(folder, how, stepping, budget_mb, transport):
    settings = {"stepping": stepping, "transport": transport}
    *expected, losses = train(None, how, **settings)
    policy = FileOffloadPolicy(folder, budget_mb)
    *actual, offloaded_losses = train(policy, how, **settings)
    assert offloaded_losses == losses
    for tensors, theirs in zip(tensors_of(*actual), tensors_of(*expected), strict=True):
        assert all(map(torch.equal, tensors, theirs))
    return policy.stats()


@pytest.mark.thin
@pytest.mark.parametrize("stepping", ["plain", "locally", "in backward"])
@pytest.mark.parametrize("budget_mb", [0, 3])
@each_way
def test_no_bit_changes(run_ranks, tmp_path, how, budget_mb, stepping):
    for stats in run_ranks(2, _compare, str(tmp_path), how, stepping, budget_mb, "auto"):
        assert stats.written > 0
        assert stats.read > 0
    assert not os.listdir(tmp_path)


def test_no_bit_changes_where_ranks_send_messages(run_ranks, tmp_path):
    run_ranks(2, _compare, str(tmp_path), "interpreted", "plain", 0, "c10d")


@pytest.mark.inductor
def test_no_bit_changes_through_inductor(run_ranks, tmp_path):
    run_ranks(2, _compare, str(tmp_path), "zero3", "plain", 0, "c10d")


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
    _model, optimizer, _ = train(policy, "interpreted")
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
    model = shard(policy)
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
    model = shard(policy)
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
        model = shard(FileOffloadPolicy(folder))
        run = compiled(model, "interpreted")
        with hooks:
            loss = mean_square(run, batch_of(ROWS, WIDTH))
        loss.backward()
        gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_hooks_on_saved_tensors_may_put_them_elsewhere(run_ranks, tmp_path):
    run_ranks(2, _with_hooks, str(tmp_path))


def _checkpoint(folder):
    model, optimizer, _ = train(FileOffloadPolicy(f"{folder}/tier"), "interpreted")
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=f"{folder}/saved")
    expected = [[each.detach().clone() for each in kind] for kind in tensors_of(model, optimizer)]
    policy = FileOffloadPolicy(f"{folder}/tier")
    model, optimizer, _ = train(policy, "interpreted", steps=1)
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
    for tensors, others in zip(tensors_of(model, optimizer), expected, strict=True):
        assert all(map(torch.equal, tensors, others))
    mean_square(model, batch_of(ROWS, WIDTH)).backward()
    optimizer.step()
    shards, states = tensors_of(model, optimizer)
    assert all(_C.is_in_file(tensor) for tensor in states if tensor.nbytes >= 64 * 1024)
    assert all(map(_C.is_in_file, shards))
    assert get_optimizer_state_dict(model, optimizer)


def test_checkpoints_have_what_is_in_the_file(run_ranks, tmp_path):
    (tmp_path / "tier").mkdir()
    run_ranks(2, _checkpoint, str(tmp_path))


@pytest.mark.usefixtures("one_rank")
def test_alike_models_with_other_policies_have_graphs_of_their_own(tmp_path):
    policies = FileOffloadPolicy(tmp_path), FileOffloadPolicy(tmp_path, 10_000), None
    activations = []
    for policy in policies:
        model = shard(policy)
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
    models = [shard(copy.deepcopy(policy)) for _ in range(2)]
    for model in models:
        model(batch_of(ROWS, WIDTH))
    shards = [parameter.to_local() for model in models for parameter in model.parameters()]
    assert not any(map(_C.is_in_file, shards))
    late = shard(policy)
    late(batch_of(ROWS, WIDTH))
    assert all(_C.is_in_file(parameter.to_local()) for parameter in late.parameters())


def _dynamic(folder):
    losses = []
    for policy in (None, FileOffloadPolicy(folder)):
        model = shard(policy)
        run = torch.compile(
            lambda x, model=model: model(x.view(x.shape[0] * x.shape[1], -1)),
            backend="zero3",
            options={"inductor": False},
            dynamic=True,
        )
        for rows in (ROWS, 2 * ROWS):
            loss = run(batch_of(2, rows, WIDTH)).square().mean()
            loss.backward()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]
    assert policy.stats().written > 8 * MIB


@pytest.mark.long
def test_sizes_may_be_symbols(run_ranks, tmp_path):
    run_ranks(2, _dynamic, str(tmp_path))


@pytest.mark.usefixtures("one_rank")
def test_the_first_forward_may_be_in_inference_mode(tmp_path):
    model = shard(FileOffloadPolicy(tmp_path))
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
    model = shard(policy)
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
    model = shard(policy)
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
    with pytest.raises(ValueError, match="memory_budget_mb is a finite number of MiB, at least 0"):
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
def test_activations_leave_gpus_only():
    model = fully_shard(nn.Linear(2, 2))
    message = r"'activations_mb' is 8, but 'weight' is on a CPU.*FileOffloadPolicy"
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(model, backend="zero3", options={"activations_mb": 8})(torch.ones(2, 2))
