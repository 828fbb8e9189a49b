"""Saves of safetensors that fail, are killed or interrupted, and what they leave."""

import contextlib
import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from features.streaming.test_safetensors import SMALL, load_from_meta, refuses, save_model
from support.models import Stack, shard
from torch import nn

from deepcompile_zero3 import Zero3Error, load_safetensors, save_safetensors
from deepcompile_zero3.features.streaming import save


def _fails(folder, rank, function):
    model, _ = shard(Stack())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    faulty = mock.patch.object(save, function, fail)
    with (
        faulty if dist.get_rank() == rank else contextlib.nullcontext(),
        pytest.raises(Zero3Error, match=f"save_safetensors, rank {rank}: .*No space left"),
    ):
        save_safetensors(model, folder, max_shard_mb=SMALL)
    dist.barrier()


@pytest.mark.parametrize(("rank", "function"), [(0, "_create"), (1, "_write"), (0, "_rename")])
def test_a_save_that_fails_leaves_the_earlier_model(run_ranks, tmp_path, rank, function):
    expected = run_ranks(2, save_model, str(tmp_path))[0]
    names = sorted(os.listdir(tmp_path))
    run_ranks(2, _fails, str(tmp_path), rank, function)
    assert sorted(os.listdir(tmp_path)) == names
    run_ranks(1, load_from_meta, str(tmp_path), expected)


def _is_killed(folder, function):
    model, _ = shard(Stack())
    whole = getattr(save, function)

    def die(*arguments):
        whole(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        setattr(save, function, die)
    save_safetensors(model, folder, max_shard_mb=SMALL)


def test_ranks_that_are_killed_leave_the_earlier_model(run_apart, run_ranks, tmp_path):
    expected = run_ranks(2, save_model, str(tmp_path))[0]
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_apart(_is_killed, str(tmp_path), "_write")
    run_ranks(1, load_from_meta, str(tmp_path), expected)


def _dies_when_it_renames(folder):
    model, _ = shard(Stack())
    renamed = os.replace

    def replace(source, target):
        renamed(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace
    save_safetensors(model, folder, max_shard_mb=SMALL)


@pytest.mark.more
def test_files_of_two_models_are_never_loaded_together(run_apart, run_ranks, tmp_path):
    run_ranks(2, save_model, str(tmp_path))
    with pytest.raises(AssertionError, match="died"):
        run_apart(_dies_when_it_renames, str(tmp_path))
    run_ranks(1, refuses, str(tmp_path), "or a save was interrupted")
    run_ranks(2, save_model, str(tmp_path))  # and the next save succeeds
    assert not list(tmp_path.glob(".*"))


def test_an_interruption_between_two_renamed_files_leaves_no_index(one_rank, tmp_path):
    model, _ = shard(Stack())
    save_safetensors(model, tmp_path, max_shard_mb=SMALL)
    renamed = os.replace

    def replace(source, target):
        renamed(source, target)
        raise KeyboardInterrupt

    with mock.patch.object(os, "replace", replace), pytest.raises(KeyboardInterrupt):
        save_safetensors(model, tmp_path, max_shard_mb=SMALL)

    with pytest.raises(Zero3Error, match="or a save was interrupted"):
        load_safetensors(model, tmp_path)
    save_safetensors(model, tmp_path, max_shard_mb=SMALL)
    assert load_safetensors(model, tmp_path) == ([], [])


def _saves_fewer(folder):
    model, _ = shard(nn.Sequential(nn.Linear(2, 3)))
    save_safetensors(model, folder)
    Path(folder, "config.json").touch()
    assert load_safetensors(model, folder) == ([], [])


def test_files_of_an_earlier_model_are_removed(run_ranks, tmp_path):
    run_ranks(2, save_model, str(tmp_path))
    run_ranks(2, _saves_fewer, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
