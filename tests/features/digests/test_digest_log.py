"""The file of a DigestLog holds the steps of a run, however often it is killed and goes on."""

import json

import pytest
import torch
import torch.distributed as dist
from support.models import shard_stack
from torch import nn

from deepcompile_zero3 import DigestLog, Zero3Error, training_digest
from deepcompile_zero3.features.digests.digest_log import read_log


def _model(value):
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def _log(path, steps, start=0, value=1.0, every=2):
    log = DigestLog(path, _model(value), every=every, start=start)
    for _ in range(steps - start):
        log.step()


def test_every_second_step_is_logged(tmp_path):
    path = tmp_path / "run.jsonl"
    log = DigestLog(path, model := _model(1.0), every=2)

    assert log.step() is None
    assert log.step() == training_digest(model)
    log.step()

    assert read_log(path).digests == {2: training_digest(model)}
    assert read_log(path).settings == {"ranks": 1, "torch": torch.__version__}


def test_half_a_line_is_ignored_and_then_overwritten(tmp_path):
    path = tmp_path / "run.jsonl"
    _log(path, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])

    assert list(read_log(path).digests) == [2]
    _log(path, 6, start=2)

    assert list(read_log(path).digests) == [2, 4, 6]
    for line in path.read_text().splitlines():
        json.loads(line)


def test_half_a_long_line_is_dropped(tmp_path):
    path = tmp_path / "run.jsonl"
    _log(path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)

    _log(path, 2, start=2)

    assert path.read_bytes().startswith(whole)
    assert b"x" * 9 not in path.read_bytes()


def test_the_later_line_of_a_step_counts(tmp_path):
    path = tmp_path / "run.jsonl"
    _log(path, 4, value=1.0)
    _log(path, 4, start=2, value=2.0)

    found = read_log(path).digests

    assert found == {2: training_digest(_model(1.0)), 4: training_digest(_model(2.0))}


def test_nothing_is_left_of_an_attempt_that_another_replaces(tmp_path):
    path = tmp_path / "run.jsonl"
    _log(path, 6, value=1.0)
    _log(path, 2, value=2.0)
    assert read_log(path).digests == {2: training_digest(_model(2.0))}

    _log(path, 6, start=2, value=2.0)
    _log(path, 4, start=4, value=3.0)
    assert list(read_log(path).digests) == [2, 4]


def _one_writes(path):
    model, _ = shard_stack()
    log = DigestLog(path, model, every=1)
    digest = log.step()
    dist.barrier()
    assert read_log(path).digests == {1: digest}
    assert read_log(path).settings["ranks"] == 2


def test_one_rank_writes(run_ranks, tmp_path):
    run_ranks(2, _one_writes, tmp_path / "run.jsonl")


def _nowhere(path):
    model, _ = shard_stack()
    with pytest.raises(Zero3Error, match="FileNotFoundError"):
        DigestLog(path, model)


def test_all_ranks_raise_if_the_file_cannot_be_written(run_ranks, tmp_path):
    run_ranks(2, _nowhere, tmp_path / "missing" / "run.jsonl", timeout=30)


def test_other_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="every must be a positive integer, got 0"):
        DigestLog(tmp_path / "run.jsonl", _model(1.0), every=0)
    with pytest.raises(ValueError, match="start must be an integer of at least 0, got -1"):
        DigestLog(tmp_path / "run.jsonl", _model(1.0), start=-1)
