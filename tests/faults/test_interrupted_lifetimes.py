"""Checkpoints that are interrupted, and models, groups and processes that end at any time."""

import gc
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.faults import each_transport, to_death
from support.models import (
    Stack,
    assert_same_step,
    batch_of,
    mean_square,
    mine,
    optimizers_of,
    shard,
    stack_and_state,
)
from support.ranks import RankPool
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from deepcompile_zero3 import Zero3Error, fully_shard

# ---- checkpoints


class _Killing(dcp.FileSystemWriter):
    """A writer that kills a rank while it saves."""

    def __init__(self, folder, moment):
        super().__init__(folder)
        self._moment = moment

    def _kill_at(self, moment, rank):
        if moment == self._moment and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_data(self, plan, planner):
        self._kill_at("before its file", 1)
        written = super().write_data(plan, planner)
        self._kill_at("after its file", 1)
        return written

    def finish(self, metadata, results):
        self._kill_at("before the metadata", 0)
        super().finish(metadata, results)


def _values(model):
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def _loads(model, state, folder):
    """Loads a checkpoint of ``stack_and_state(0)`` and checks the values."""
    dcp.load(state, checkpoint_id=folder)
    torch.testing.assert_close(_values(model), _values(stack_and_state(0)[0]), rtol=0, atol=0)


def _save_and_die(folder, moment):
    _, state = stack_and_state(0)
    dcp.save(state, checkpoint_id=f"{folder}/last")
    dcp.save(state, storage_writer=_Killing(f"{folder}/next", moment))


def _load_the_last(folder):
    model, state = stack_and_state(1)
    with pytest.raises(CheckpointException, match="metadata"):
        dcp.load(state, checkpoint_id=f"{folder}/next")
    torch.testing.assert_close(_values(model), _values(stack_and_state(1)[0]), rtol=0, atol=0)
    _loads(model, state, f"{folder}/last")


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before its file", marks=pytest.mark.more),
        "after its file",
        "before the metadata",
    ],
)
def test_a_rank_that_is_killed_while_it_saves_spares_the_last_checkpoint(
    run_ranks, tmp_path, moment
):
    assert "died with exit code -9" in to_death(_save_and_die, str(tmp_path), moment)
    run_ranks(2, _load_the_last, str(tmp_path))


def _save_and_die_at(folder, rank, moment):
    """Saves, and kills ``rank`` at a moment. Returns the moment of the first write and the last
    moment. Moments are counted in audit events.
    """
    _, state = stack_and_state(0)
    target = f"{folder}/{rank} {moment}"
    moments, first = 0, None

    def look(event, args):
        nonlocal moments, first
        moments += 1
        if first is None and event == "open" and str(args[0]).startswith(target):
            first = moments
        if moments == moment and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    dcp.save(state, checkpoint_id=target)
    assert first is not None
    return first, moments


def _load_what_is_whole(folder, interrupted):
    """Returns the names of the checkpoints that can be loaded."""
    whole = []
    for name in interrupted:
        model, state = stack_and_state(1)
        before = _values(model)
        try:
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
        except CheckpointException:
            torch.testing.assert_close(_values(model), before, rtol=0, atol=0)
        else:
            torch.testing.assert_close(
                _values(model), _values(stack_and_state(0)[0]), rtol=0, atol=0
            )
            whole.append(name)
        _loads(model, state, f"{folder}/good")
    return whole


@pytest.mark.parametrize("moments_of_each", [4, pytest.param(8, marks=pytest.mark.long)])
def test_a_save_that_is_interrupted_at_any_moment_spares_the_last_checkpoint(
    run_ranks, tmp_path, moments_of_each
):
    run_ranks(2, _save, str(tmp_path))
    pool = RankPool(2)
    moments = pool.run(_save_and_die_at, str(tmp_path), None, None, timeout=60)
    pool.close()
    killed = [
        (rank, moment)
        for rank, (first, last) in enumerate(moments)
        for moment in range(first, last + 1, math.ceil((last + 1 - first) / moments_of_each))
    ]
    for rank, moment in killed:
        assert f"rank {rank} died with" in to_death(_save_and_die_at, str(tmp_path), rank, moment)
    interrupted = [f"{rank} {at}" for rank, at in killed]
    one, other = run_ranks(2, _load_what_is_whole, str(tmp_path), interrupted)
    assert one == other
    begun = [name for name in interrupted if any((tmp_path / name).glob("*"))]
    assert set(begun) - set(one), "no save was interrupted after it had begun to write"


def _save_to_a_full_disk(folder):
    model, reference = shard(Stack())
    state = {"model": get_model_state_dict(model)}
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(CheckpointException, match="File too large"):
            dcp.save(state, checkpoint_id=f"{folder}/full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert_same_step(model, reference, batch_of(4, 8), optimizers=optimizers_of(model, reference))
    dcp.save(state, checkpoint_id=f"{folder}/good")


def test_training_goes_on_after_a_save_to_a_full_disk(run_ranks, tmp_path):
    run_ranks(2, _save_to_a_full_disk, str(tmp_path))


def _save(folder):
    _, state = stack_and_state(0)
    dcp.save(state, checkpoint_id=f"{folder}/good")
    foreign = get_model_state_dict(fully_shard(nn.Linear(8, 8)))
    dcp.save({"model": foreign}, checkpoint_id=f"{folder}/foreign")
    wide = get_model_state_dict(fully_shard(Stack(width=16)))
    dcp.save({"model": wide}, checkpoint_id=f"{folder}/wide")


def _load_what_is_bad(folder, kind):
    """Returns whether a failed load left the model unchanged, and the error."""
    model, state = stack_and_state(1)
    before = _values(model)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
    is_unchanged = all(torch.equal(*pair) for pair in zip(_values(model), before, strict=True))
    _loads(model, state, f"{folder}/good")
    return is_unchanged, str(raised.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "your checkpoint file is corrupted"),
        ("foreign", "Missing key in checkpoint state_dict: model.blocks.0.norm.weight"),
        pytest.param(
            "wide",
            r"Size mismatch between saved torch.Size\(\[16\]\) and current: .*0.norm.weight",
            marks=pytest.mark.more,
        ),
    ],
)
def test_a_bad_checkpoint_is_refused_and_a_good_one_loaded_after_it(
    run_ranks, tmp_path, kind, message
):
    run_ranks(2, _save, str(tmp_path))
    shutil.copytree(tmp_path / "good", tmp_path / "truncated")
    file = sorted((tmp_path / "truncated").glob("*.distcp"))[-1]
    os.truncate(file, file.stat().st_size // 2)
    for is_unchanged, told in run_ranks(2, _load_what_is_bad, str(tmp_path), kind):
        assert re.search(message, told)
        assert is_unchanged or kind == "truncated"


# ---- the lives of models, groups and processes


def _destroy_the_group(transport):
    """Returns the error of a model whose group is gone; checks that another model still trains."""
    groups = dist.new_group(), dist.new_group()
    model, other = (
        fully_shard(Stack(), mesh=DeviceMesh.from_group(group, "cpu"), transport=transport)
        for group in groups
    )
    batch = mine(batch_of(4, 8))
    for each in (model, other):
        mean_square(each, batch).backward()
    expected = [parameter.grad.to_local().clone() for parameter in other.parameters()]
    dist.destroy_process_group(groups[0])
    told = None
    try:
        mean_square(model, batch).backward()
    except Zero3Error as error:
        told = str(error)
    del model
    gc.collect()
    other.zero_grad()
    mean_square(other, batch).backward()
    for parameter, gradient in zip(other.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad.to_local(), gradient)
    return told


@each_transport
def test_a_model_whose_group_is_destroyed_hurts_no_other(run_ranks, transport):
    for told in run_ranks(2, _destroy_the_group, transport):
        assert "the process group of a sharded model is gone" in told


def _delete_another(transport):
    batch = batch_of(4, 8)
    one, reference = shard(Stack(), transport=transport)
    two, _ = shard(Stack(), transport=transport)
    optimizers = optimizers_of(one, reference)
    assert_same_step(one, reference, batch, optimizers=optimizers)
    other_loss = mean_square(two, mine(batch))
    loss = mean_square(one, mine(batch))
    del two, other_loss
    gc.collect()
    loss.backward()
    one.zero_grad()
    assert_same_step(one, reference, batch, optimizers=optimizers)


@each_transport
def test_a_model_may_be_deleted_while_another_trains(run_ranks, transport):
    run_ranks(2, _delete_another, transport)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from deepcompile_zero3 import fully_shard

store, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
models = []
for transport in ("shared_memory", "c10d"):
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8), transport=transport)
    compiled = torch.compile(model, backend="zero3", options={"inductor": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(8, 8)
    for run in (model, compiled):
        loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
        for seed, rows in enumerate(loader):
            assert torch.equal(rows, data[2 * seed : 2 * seed + 2])
            run(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    models.append((model, compiled, compiled(data).sum()))
print("trained")
"""


@pytest.mark.long
def test_workers_are_forked_and_a_process_ends_with_models_alive(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, error = rank.communicate(timeout=120)
        assert rank.returncode == 0, error
        assert out == "trained\n"
        assert not re.search("Error|error|Traceback|terminate", error), error
