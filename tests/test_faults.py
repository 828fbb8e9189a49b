"""What goes wrong in training: who is told what, within which time, and what the next step is like.

``docs/reliability.md`` lists the faults, those of other files too.
"""

import contextlib
import gc
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import documents
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import (
    Stack,
    assert_same_step,
    batch_of,
    compiled,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from ranks import RankPool
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from deepcompile_zero3 import Zero3Error, fully_shard

TIMEOUT = 3  # seconds, of a group in which a rank stands still
LONG = 60  # of one in which nobody waits for that
SLACK = 10  # of a machine that is busy

each_transport = pytest.mark.parametrize("transport", ["shared_memory", "c10d"])


# ---- a rank is gone, or stands still


def _let(act, moment, model, optimizer):
    """Lets ``act()`` happen at a moment of each step to come."""
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


def _act(what):
    """What becomes of this rank."""
    match what:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exits":
            os._exit(1)
        case "asleep":
            time.sleep(TIMEOUT + 3)
        case "raises":
            raise ZeroDivisionError


def _one_rank(what, moment, transport, timeout):
    """Rank 1 meets its fate, and raises its own exception or none; rank 0 says what it is told."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    is_hit = dist.get_rank() == 1
    start = time.monotonic()
    try:
        if is_hit and moment == "fully_shard":
            _act(what)
        mesh = DeviceMesh.from_group(group, "cpu")
        model = Stack()
        model, _ = shard(model, model.blocks, mesh=mesh, transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            start = time.monotonic()
            if is_hit and step == 1:
                if moment == "between steps":
                    _act(what)
                model.set_requires_gradient_sync(what != "withholds")
                _let(lambda: _act(what), moment, model, optimizer)
            mean_square(model, mine(batch_of(4, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        seconds = time.monotonic() - start
        if not is_hit and what in ("stopped", "asleep"):
            os.kill(pids[1], signal.SIGKILL)  # or the pool would wait for it
        raise RuntimeError(f"after {seconds:.2f} s: {type(error).__name__}: {error}") from None


def _to_death(function, *args):
    """What two new ranks say, of which one or both fail."""
    pool = RankPool(2)
    try:
        with pytest.raises(AssertionError) as raised:
            pool.run(function, *args, timeout=60)
    finally:
        pool.close()
    return str(raised.value)


def _told(*args):
    """How long rank 0 waited for the other in ``_one_rank(*args)``, and what it was told."""
    said = _to_death(_one_rank, *args)
    found = re.search(r"after ([\d.]+) s: (.*)", said)
    assert found, said
    print(f"{args}: {found[1]} s")  # for the document
    return float(found[1]), found[2]


def _names_rank_1(message):
    return re.match(
        r"Zero3Error: zero3: (cannot go on without rank 1 \(pid \d+|"
        r"waited \d+ s for rank 1 \(pid \d+|an exchange with rank 1 failed \(|"
        r"a backward has ended on rank 1 without a gradient of '|"
        r"rank 1 has gone on without a backward of ')",
        message,
    )


@pytest.mark.thin
@each_transport
@pytest.mark.parametrize(
    "moment", ["fully_shard", "between steps", "forward", "backward", "optimizer"]
)
def test_a_rank_that_is_killed_is_missed_at_once(moment, transport):
    seconds, message = _told("killed", moment, transport, LONG)
    assert seconds < SLACK
    if moment == "fully_shard":
        assert message.startswith(
            "Zero3Error: fully_shard: memory: ranks [0, 1] could not tell each other"
        )
    else:
        assert _names_rank_1(message)
        assert transport == "c10d" or ", dead): it has not " in message


@each_transport
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_rank_that_raises_and_ends_is_missed_at_once(moment, transport):
    seconds, message = _told("exits", moment, transport, LONG)
    assert seconds < SLACK
    assert _names_rank_1(message)


@pytest.mark.parametrize(
    ("what", "moment", "transport"),
    [
        ("stopped", "forward", "c10d"),
        ("asleep", "backward", "shared_memory"),
        pytest.param("stopped", "forward", "shared_memory", marks=pytest.mark.long),
        pytest.param("asleep", "backward", "c10d", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_stands_still_is_missed_in_time(what, moment, transport):
    seconds, message = _told(what, moment, transport, TIMEOUT)
    assert TIMEOUT - 0.5 <= seconds < TIMEOUT + SLACK
    assert _names_rank_1(message)


@pytest.mark.thin
@each_transport
@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer"])
def test_a_rank_that_raises_and_stays_is_missed_in_time(moment, transport):
    seconds, message = _told("raises", moment, transport, TIMEOUT)
    assert seconds < TIMEOUT + SLACK
    assert _names_rank_1(message)


@each_transport
def test_a_rank_that_withholds_its_gradients_is_missed_in_time(transport):
    seconds, message = _told("withholds", "never", transport, TIMEOUT)
    assert seconds < TIMEOUT + SLACK
    assert _names_rank_1(message)


def _leaving(folder):
    Path(folder, "ranks", str(os.getpid())).touch()
    tempfile.tempdir = None  # it is read again
    _one_rank("killed", "backward", "auto", LONG)


def test_a_rank_that_is_killed_leaves_no_file_and_no_process(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    ranks = tmp_path / "ranks"
    temporary.mkdir()
    ranks.mkdir()
    pool = RankPool(2, TMPDIR=str(temporary))
    try:
        with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
            pool.run(_leaving, str(tmp_path))
    finally:
        pool.close()
    pids = {int(file.name) for file in ranks.iterdir()}
    assert len(pids) == 2
    assert list(temporary.iterdir()) == []
    shared = os.listdir("/dev/shm")
    assert not [name for name in shared if "zero3" in name or any(str(p) in name for p in pids)]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            assert not pids & {pid, parent}


# ---- all ranks raise at one place


def _raise(error):
    if error is KeyboardInterrupt:
        signal.raise_signal(signal.SIGINT)
    raise error("injected")


def _faulty_step(model, batch, optimizer, error_of_the_loader):
    if error_of_the_loader is not None:
        model.set_requires_gradient_sync(False)
        mean_square(model, mine(batch)).backward()
        _raise(error_of_the_loader)
    mean_square(model, mine(batch)).backward()
    optimizer.step()


def _recover(place, transport):
    """Steps that raise on all ranks, and the right ones after them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = Stack()
    model, reference = shard(model, model.blocks, transport=transport)
    optimizers = optimizers_of(model, reference)
    armed = []

    def trap():
        for error in armed:
            _raise(error)

    _let(trap, place, model, optimizers[0])
    for seed, error in enumerate(
        (ZeroDivisionError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)
    ):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, optimizers=optimizers)
        armed.append(error)
        with pytest.raises(error):
            _faulty_step(model, batch, optimizers[0], error if place == "loader" else None)
        armed.clear()
        model.set_requires_gradient_sync(True)
        if place == "loader":
            model.reset_iter_state()
        model.zero_grad()
    for seed in (8, 9):  # the second has what the first has changed
        assert_same_step(model, reference, batch_of(4, 8, seed=seed), optimizers=optimizers)


@pytest.mark.thin
@each_transport
@pytest.mark.parametrize("place", ["forward", "backward", "hook", "optimizer", "loader"])
def test_the_step_after_one_that_raises_on_all_ranks_is_right(run_ranks, place, transport):
    run_ranks(2, _recover, place, transport)


class _BrokenStack(Stack):
    """Its graph breaks, and what is around that runs for real."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def _interrupt_between_graphs(transport):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = _BrokenStack()
    model, reference = shard(model, model.blocks, transport=transport)
    optimizers = optimizers_of(model, reference)
    run = compiled(model, "interpreted")
    armed = []

    @torch.compiler.disable
    def trap(*_):
        for error in armed:
            _raise(error)

    model.blocks[1].register_forward_pre_hook(trap)
    assert_same_step(model, reference, batch_of(4, 8), run=run, optimizers=optimizers)
    armed.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(mine(batch_of(4, 8)))
    armed.clear()
    assert model._zero3_group.depth == 0
    for seed in range(3):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


class _Recursive(nn.Module):
    """Calls itself, and goes on if that is interrupted."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.interrupts = False

    def forward(self, x, depth=1):
        if depth == 0:
            if self.interrupts:
                raise KeyboardInterrupt
            return self.linear(x)
        with contextlib.suppress(KeyboardInterrupt):
            x = self(x, depth - 1)
        return self.linear(x)


def _interrupt_within_itself(transport):
    model, reference = shard(_Recursive(), transport=transport)
    optimizers = optimizers_of(model, reference)
    for interrupts in (False, True, True, False):
        model.interrupts = reference.interrupts = interrupts
        assert_same_step(model, reference, batch_of(4, 8), optimizers=optimizers)
        assert model._zero3_group.depth == 0


@each_transport
def test_a_module_may_be_interrupted_where_it_calls_itself(run_ranks, transport):
    run_ranks(2, _interrupt_within_itself, transport)


@each_transport
def test_the_step_after_an_interrupt_between_graphs_is_right(run_ranks, transport):
    run_ranks(2, _interrupt_between_graphs, transport)


def _interrupt_a_wait(transport):
    """Rank 0 is interrupted while it waits for rank 1; then both begin again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = dist.new_group(timeout=timedelta(seconds=LONG))
    mesh = DeviceMesh.from_group(group, "cpu")
    model, reference = shard(Stack(), mesh=mesh, transport=transport)
    batch = batch_of(4, 8)
    assert_same_step(model, reference, batch)
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT)
        if transport == "c10d":
            model(mine(batch))
    else:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            model(mine(batch))
    seconds = time.monotonic() - start
    dist.barrier()
    assert_same_step(*shard(Stack(), transport=transport), batch)
    return seconds


def test_a_wait_in_shared_memory_can_be_interrupted(run_ranks):
    seconds = run_ranks(2, _interrupt_a_wait, "shared_memory")[0]
    assert seconds < TIMEOUT - 0.5


def test_a_wait_for_messages_is_interrupted_when_it_ends(run_ranks):
    seconds = run_ranks(2, _interrupt_a_wait, "c10d")[0]
    assert seconds > TIMEOUT - 0.5


# ---- ranks shard different things


def _renamed(model):
    model.tail = model.head
    del model.head


def _reordered(model):
    up = model.blocks[0].up
    weight, bias = up.weight, up.bias
    del up.weight, up.bias
    up.bias, up.weight = bias, weight


def _smaller(model):
    model.head = nn.Linear(8, 4)


def _narrower(model):
    model.head.double()


def _fewer(model):
    model.head.bias = None


def _frozen(model):
    model.head.weight.requires_grad_(False)


def _of_another_grad_dtype(model):
    model.head.weight.grad_dtype = torch.float64


DIFFERENCES = {
    "name": (_renamed, {}),
    "order": (_reordered, {}),
    "shape": (_smaller, {}),
    "dtype": (_narrower, {}),
    "number": (_fewer, {}),
    "requires_grad": (_frozen, {}),
    "grad_dtype": (_of_another_grad_dtype, {}),
    "param_dtype": (None, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    "reduce_dtype": (None, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
    "reshard_after_forward": (None, {"reshard_after_forward": False}),
    "placement": (None, {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}),
}


def _differ(what, transport):
    change, settings = DIFFERENCES[what]
    is_other = dist.get_rank() == 1
    model = Stack()
    if is_other and change is not None:
        change(model)
    start = time.monotonic()
    with pytest.raises(Zero3Error, match="ranks disagree on the module's parameter"):
        fully_shard(model, transport=transport, **(settings if is_other else {}))
    seconds = time.monotonic() - start
    assert type(model) is Stack
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    torch.manual_seed(0)
    assert_same_step(*shard(Stack(), transport=transport), batch_of(4, 8))
    return seconds


@pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("c10d", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_shard_different_things_are_told(run_ranks, what, transport):
    assert max(run_ranks(2, _differ, what, transport)) < SLACK


# ---- numbers


def _nan(transport):
    """One rank's NaN, which nobody looks for."""
    model, reference = shard(Stack(), transport=transport)
    batch = batch_of(4, 8)
    rows = mine(batch).clone()
    if dist.get_rank() == 1:
        rows[0, 0] = torch.nan
    mean_square(model, rows).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    model.zero_grad()
    assert_same_step(model, reference, batch)


@each_transport
def test_a_nan_reaches_the_norm_of_all_ranks(run_ranks, transport):
    run_ranks(2, _nan, transport)


def _overflow(transport):
    """The scales of a loss whose float16 gradients are too large on one rank at first."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model, _ = shard(Stack(), transport=transport, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    rows = mine(batch_of(4, 8)) * (50.0 if dist.get_rank() == 1 else 1.0)
    scales, changed = [], []
    for _ in range(12):
        before = model.head.weight.full_tensor().clone()
        scaler.scale(model(rows).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        changed.append(not torch.equal(model.head.weight.full_tensor(), before))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return scales, changed


@each_transport
def test_an_overflow_of_float16_skips_the_step_on_all_ranks(run_ranks, transport):
    first, second = run_ranks(2, _overflow, transport)
    assert first == second
    scales, changed = first
    assert changed[0] is False
    assert changed[-1] is True
    assert scales[-1] < 2.0**16


# ---- checkpoints


class _Killing(dcp.FileSystemWriter):
    """Kills a rank while it saves."""

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


def _built(seed):
    torch.manual_seed(seed)
    model = Stack()
    model, _ = shard(model, model.blocks)
    return model, {"model": get_model_state_dict(model)}


def _values(model):
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def _loads(model, state, folder):
    """Loads the checkpoint of ``_built(0)``."""
    dcp.load(state, checkpoint_id=folder)
    torch.testing.assert_close(_values(model), _values(_built(0)[0]), rtol=0, atol=0)


def _save_and_die(folder, moment):
    _, state = _built(0)
    dcp.save(state, checkpoint_id=f"{folder}/last")
    dcp.save(state, storage_writer=_Killing(f"{folder}/next", moment))


def _load_the_last(folder):
    model, state = _built(1)
    with pytest.raises(CheckpointException, match="metadata"):
        dcp.load(state, checkpoint_id=f"{folder}/next")
    torch.testing.assert_close(_values(model), _values(_built(1)[0]), rtol=0, atol=0)
    _loads(model, state, f"{folder}/last")


@pytest.mark.parametrize("moment", ["before its file", "after its file", "before the metadata"])
def test_a_rank_that_is_killed_while_it_saves_spares_the_last_checkpoint(
    run_ranks, tmp_path, moment
):
    assert "died with exit code -9" in _to_death(_save_and_die, str(tmp_path), moment)
    run_ranks(2, _load_the_last, str(tmp_path))


def _save_and_die_at(folder, rank, moment):
    """Saves, unless the moment comes that is the rank's last. Returns the moment at which it begins
    to write, and the last. A moment is anything that an audit would show.
    """
    _, state = _built(0)
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
    """Which of these checkpoints can be loaded."""
    whole = []
    for name in interrupted:
        model, state = _built(1)
        before = _values(model)
        try:
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
        except CheckpointException:
            torch.testing.assert_close(_values(model), before, rtol=0, atol=0)
        else:
            torch.testing.assert_close(_values(model), _values(_built(0)[0]), rtol=0, atol=0)
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
        assert f"rank {rank} died with" in _to_death(_save_and_die_at, str(tmp_path), rank, moment)
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
    _, state = _built(0)
    dcp.save(state, checkpoint_id=f"{folder}/good")
    foreign = get_model_state_dict(fully_shard(nn.Linear(8, 8)))
    dcp.save({"model": foreign}, checkpoint_id=f"{folder}/foreign")
    wide = get_model_state_dict(fully_shard(Stack(width=16)))
    dcp.save({"model": wide}, checkpoint_id=f"{folder}/wide")


def _load_what_is_bad(folder, kind):
    """Whether the model is what it was, once loading has failed."""
    model, state = _built(1)
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
        ("wide", r"Size mismatch between saved torch.Size\(\[16\]\) and current: .*0.norm.weight"),
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
    """What a model says whose group is gone; another goes on."""
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


# ---- the document


ROWS = documents.rows_of("reliability.md")


def test_the_document_has_forty_faults():
    assert len(ROWS) >= 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_of_the_document_names_the_tests_that_inject_it(row):
    fault, promise, seconds, tests = row
    assert fault
    assert promise
    assert seconds
    documents.assert_tests_exist(tests)
