"""Faults in training: which rank raises what, after how long, and whether the next step is right.

``docs/reliability.md`` lists these faults and those of other files.
"""

import contextlib
import os
import re
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import documents
from support.faults import LONG, TIMEOUT, each_transport, let, to_death
from support.models import Stack, assert_same_step, batch_of, mean_square, mine, shard
from support.ranks import RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from deepcompile_zero3 import Zero3Error, fully_shard

SLACK = 10  # seconds; for a busy machine


# ---- a rank is gone, or stands still


def _act(what):
    """Lets this rank fail in the given way."""
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
    """Trains while rank 1 fails; raises this rank's error with the seconds since the step began."""
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
                let(lambda: _act(what), moment, model, optimizer)
            mean_square(model, mine(batch_of(4, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        seconds = time.monotonic() - start
        if not is_hit and what in ("stopped", "asleep"):
            os.kill(pids[1], signal.SIGKILL)  # otherwise the pool waits for rank 1
        told = f"rank {dist.get_rank()} after {seconds:.2f} s: {type(error).__name__}: {error}"
        raise RuntimeError(told) from None


def _told(*args):
    """Returns how long rank 0 waited in ``_one_rank(*args)``, and its error."""
    said = to_death(_one_rank, *args)
    found = re.search(r"rank 0 after ([\d.]+) s: (.*)", said)
    assert found, said
    print(f"{args}: {found[1]} s")  # for the table in the document
    return float(found[1]), found[2]


def _names_rank_1(message):
    return re.match(
        r"Zero3Error: zero3: (cannot go on without rank 1 \(pid \d+|"
        r"waited \d+ s for rank 1 \(pid \d+|an exchange with rank 1 failed \(|"
        r"a backward has ended on rank 1 without a gradient of '|"
        r"rank 1 has gone on without a backward of ')",
        message,
    )


@pytest.mark.gloo  # collectives say that others have failed, not which
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
            "Zero3Error: fully_shard: arguments: ranks [0, 1] could not tell each other"
        )
    else:
        assert _names_rank_1(message)
        assert transport == "c10d" or ", dead): it has not " in message


@pytest.mark.gloo
@each_transport
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_rank_that_raises_and_ends_is_missed_at_once(moment, transport):
    seconds, message = _told("exits", moment, transport, LONG)
    assert seconds < SLACK
    assert _names_rank_1(message)


@pytest.mark.gloo
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


@pytest.mark.gloo
@pytest.mark.thin
@each_transport
@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer"])
def test_a_rank_that_raises_and_stays_is_missed_in_time(moment, transport):
    seconds, message = _told("raises", moment, transport, TIMEOUT)
    assert seconds < TIMEOUT + SLACK
    assert _names_rank_1(message)


@pytest.mark.gloo
@pytest.mark.first(transport="c10d")
@each_transport
def test_a_rank_that_withholds_its_gradients_is_missed_in_time(transport):
    seconds, message = _told("withholds", "never", transport, TIMEOUT)
    assert seconds < TIMEOUT + SLACK
    assert _names_rank_1(message)


def _crashes():
    os.abort()


def test_a_rank_that_crashes_leaves_its_stack(run_apart):
    with pytest.raises(AssertionError, match=r"(?s)died with exit code -6, in\n.*_crashes"):
        run_apart(_crashes)


def _leaving(folder):
    Path(folder, "ranks", str(os.getpid())).touch()
    tempfile.tempdir = None  # makes tempfile look again
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
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            assert not pids & {pid, parent}


def _waits_for_a_bucket_of_many():
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), transport="c10d")
    if dist.get_rank() == 1:
        time.sleep(2)
        return ""
    with pytest.raises(Zero3Error) as raised:
        model(torch.ones(2, 8))
    return str(raised.value)


@pytest.mark.gloo
def test_an_error_of_a_large_bucket_names_the_first_of_its_parameters(run_apart):
    told, _ = run_apart(_waits_for_a_bucket_of_many)
    assert re.match(
        r"zero3: an exchange with rank 1 failed \(gather Float 0\.weight.* and others\)", told
    )
    assert len(told.partition(". Either that rank has stopped")[0]) < 400


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
    "name": (_renamed, {}, "'head.weight' on rank 0 and 'tail.weight' on"),
    "order": (_reordered, {}, "'blocks.0.up.weight' on rank 0 and 'blocks.0.up.bias' on"),
    "shape": (
        _smaller,
        {},
        "'head.weight', shape=[8, 8] on rank 0 and 'head.weight', shape=",
    ),
    "dtype": (_narrower, {}, "'head.weight', dtype=torch.float32, "),
    "number": (_fewer, {}, "'head.bias' on rank 0 and missing on"),
    "requires_grad": (
        _frozen,
        {},
        "'head.weight', requires_grad=True on rank 0",
    ),
    "grad_dtype": (_of_another_grad_dtype, {}, ", grad_dtype=torch.float64 on"),
    "param_dtype": (
        None,
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        ", dtype=torch.bfloat16 on",
    ),
    "reduce_dtype": (
        None,
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        ", reduce_dtype=torch.float64 on",
    ),
    "reshard_after_forward": (
        None,
        {"reshard_after_forward": False},
        ", reshard_after_forward=False on",
    ),
    "placement": (
        None,
        {"shard_placement_fn": lambda p: Shard(p.dim() - 1)},
        ", placements=(Shard(dim=1),)",
    ),
}


def _differ(what, transport):
    change, settings, told = DIFFERENCES[what]
    is_other = dist.get_rank() == 1
    model = Stack()
    if is_other and change is not None:
        change(model)
    start = time.monotonic()
    with pytest.raises(Zero3Error, match="ranks disagree on the module's parameter") as raised:
        fully_shard(model, transport=transport, **(settings if is_other else {}))
    if not is_other:
        assert told in str(raised.value)
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
def test_ranks_that_shard_different_things_get_an_error(run_ranks, what, transport):
    assert max(run_ranks(2, _differ, what, transport)) < SLACK


# ---- numbers


def _nan(transport):
    """Gives one rank's input a NaN that nothing checks for before the norm."""
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
    """Trains with float16 gradients that at first overflow on one rank; returns the loss scales and
    whether each step changed the weights.
    """
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
