"""``dcp.async_save`` saves the values of the step at which it begins, while training goes on."""

import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.faults import to_death
from support.matrix_optimizers import Blockwise
from support.mesh_models import replicas
from support.models import Stack, batch_of, compiled, each_way, mean_square, mine
from support.owned_models import in_blocks, muon_and_adam
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import (
    FileOffloadPolicy,
    MatrixOwners,
    fully_shard,
    offload_optimizer,
    step_in_backward,
    step_locally,
    training_digest,
)

LAYOUTS = [
    "shards",
    "replicas",
    "owners",
    "states of ranks",
    "early steps",
    pytest.param("a file", marks=pytest.mark.gloo),
]
WIDTH = 128  # states that are large enough for a file


def _built(layout, folder, seed):
    """Returns a model with values of ``seed``, and its optimizers."""
    torch.manual_seed(seed)
    model = Stack(width=WIDTH)
    settings = {}
    if layout == "owners":
        owners = MatrixOwners(model, is_matrix=in_blocks)
        settings["shard_placement_fn"] = owners
    if layout == "replicas":
        settings["mesh"] = replicas()
    if layout == "a file":
        settings["offload_policy"] = FileOffloadPolicy(folder)
    for module in (*model.blocks, model):
        fully_shard(module, **settings)
    match layout:
        case "owners":
            optimizers = muon_and_adam(model, owners)
        case "states of ranks":
            optimizers = (Blockwise(model.parameters()),)
            step_locally(*optimizers, is_elementwise=True)  # of a rank's own rows
        case _:
            optimizers = (torch.optim.AdamW(model.parameters(), 0.01),)
    if layout == "a file":
        offload_optimizer(model, *optimizers, part_mb=0.05)
    if layout == "early steps":
        step_in_backward(model, *optimizers)
    return model, optimizers


def _steps(model, run, optimizers, seeds):
    for seed in seeds:
        mean_square(run, mine(batch_of(8, WIDTH, seed=seed))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _state(model, optimizers):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))


def _stager():
    return DefaultStager(StagingOptions(False, False, False, False))


class _Held(dcp.FileSystemWriter):
    """A writer that waits until it is let go on."""

    def __init__(self, folder):
        super().__init__(folder)
        self.go_on = threading.Event()

    def write_data(self, plan, planner):
        assert self.go_on.wait(60)
        return super().write_data(plan, planner)


def _save_and_train_on(layout, how, folder):
    """Returns the digests at the begin of a save, and after the steps that it takes."""
    model, optimizers = _built(layout, folder, seed=0)
    run = compiled(model, how)
    _steps(model, run, optimizers, range(1))
    stager, group = _stager(), dist.new_group(backend="gloo")
    # A stager that is kept writes the later copies to the memory of the first.
    dcp.async_save(
        _state(model, optimizers),
        checkpoint_id=f"{folder}/first",
        process_group=group,
        async_stager=stager,
    ).result()
    _steps(model, run, optimizers, range(1, 2))
    begin = training_digest(model, optimizers)
    writer = _Held(f"{folder}/checkpoint")
    saving = dcp.async_save(
        _state(model, optimizers),
        storage_writer=writer,
        process_group=group,
        async_stager=stager,
    )
    _steps(model, run, optimizers, range(2, 5))
    assert not saving.done()
    writer.go_on.set()
    saving.result()
    stager.close()
    return begin, training_digest(model, optimizers)


def _resume(layout, how, folder):
    """Returns the digests after loading, and after three steps more."""
    model, optimizers = _built(layout, folder, seed=1)
    state = _state(model, optimizers)
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(
        model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    loaded = training_digest(model, optimizers)
    _steps(model, compiled(model, how), optimizers, range(2, 5))
    return loaded, training_digest(model, optimizers)


@pytest.mark.parametrize(
    "layout",
    [
        "shards",
        pytest.param("owners", marks=pytest.mark.more),
        pytest.param("replicas", marks=pytest.mark.long),
        *LAYOUTS[3:],
    ],
)
def test_a_save_has_the_values_of_the_step_at_which_it_begins(run_ranks, tmp_path, layout):
    saved = run_ranks(2, _save_and_train_on, layout, "eager", str(tmp_path))
    loaded = run_ranks(2, _resume, layout, "eager", str(tmp_path))
    assert saved[0][0] != saved[0][1]
    assert loaded == saved


@each_way
def test_a_save_during_compiled_steps_has_the_values_of_its_begin(run_ranks, tmp_path, how):
    saved = run_ranks(2, _save_and_train_on, "shards", how, str(tmp_path))
    assert run_ranks(2, _resume, "shards", how, str(tmp_path)) == saved


def _staged_bytes(layout, folder):
    """Returns the bytes of the tensors of a state dict, and of the copies of their storages."""
    model, optimizers = _built(layout, folder, seed=0)
    _steps(model, model, optimizers, range(1))
    state = _state(model, optimizers)
    stager = _stager()
    copies = {}
    nbytes = 0

    def visit(value):
        nonlocal nbytes
        if isinstance(value, dict):
            for each in value.values():
                visit(each)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            storage = local.untyped_storage()
            copies[storage.data_ptr()] = storage.nbytes()
            nbytes += local.nbytes

    visit(stager.stage(state))
    stager.close()
    return sum(copies.values()), nbytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_copies_the_shards_alone(run_ranks, tmp_path, layout):
    for copied, nbytes in run_ranks(2, _staged_bytes, layout, str(tmp_path)):
        assert copied <= 1.1 * nbytes


class _Killing(_Held):
    """A writer that kills a rank at a moment of a save."""

    def __init__(self, folder, rank, moment):
        super().__init__(folder)
        self.go_on.set()
        self._moment = moment
        self._is_here = dist.get_rank() == rank
        files = {"in its file": f"__{rank}_0", "in the metadata": ".metadata.tmp"}
        self._opened = f"{folder}/{files.get(moment)}"
        sys.addaudithook(self._look)

    def _look(self, event, args):
        if event == "open" and str(args[0]).startswith(self._opened):
            self.kill_at(self._moment)
        if event == "os.rename" and str(args[0]).endswith(".metadata.tmp"):
            self.kill_at("as the metadata gets its name")

    def kill_at(self, moment):
        if self._is_here and moment == self._moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_data(self, plan, planner):
        self.kill_at("before its file")
        written = super().write_data(plan, planner)
        self.kill_at("after its file")
        return written

    def finish(self, metadata, results):
        super().finish(metadata, results)
        self.kill_at("after the metadata")


class _KillingStager(DefaultStager):
    def __init__(self, writer):
        super().__init__(StagingOptions(False, False, False, False))
        self._writer = writer

    def stage(self, state_dict, **kwargs):
        staged = super().stage(state_dict, **kwargs)
        self._writer.kill_at("as it is copied")
        return staged


MOMENTS = [
    (1, "in its file"),
    (0, "in the metadata"),
    (1, "in a step"),
    *(
        pytest.param(*moment, marks=pytest.mark.more)
        for moment in (
            (0, "as it is copied"),
            (1, "before its file"),
            (0, "in its file"),
            (1, "after its file"),
            (0, "as the metadata gets its name"),
            (0, "after the metadata"),
        )
    ),
]


def _save_and_die(folder, rank, moment):
    model, optimizers = _built("shards", folder, seed=0)
    _steps(model, model, optimizers, range(1))
    dcp.save(_state(model, optimizers), checkpoint_id=f"{folder}/last")
    _steps(model, model, optimizers, range(1, 2))
    writer = _Killing(f"{folder}/next", rank, moment)
    if moment == "in a step":
        writer.go_on.clear()
        optimizers[0].register_step_pre_hook(lambda *_: writer.kill_at("in a step"))
    saving = dcp.async_save(
        _state(model, optimizers),
        storage_writer=writer,
        process_group=dist.new_group(backend="gloo"),
        async_stager=_KillingStager(writer),
    )
    _steps(model, model, optimizers, range(2, 200))
    saving.result()


def _goes_on(folder):
    """Loads the later checkpoint if it is whole, and else the one before. Returns its name."""
    model, optimizers = _built("shards", folder, seed=1)
    for name, steps in (("next", 2), ("last", 1)):
        before = training_digest(model, optimizers)
        state = _state(model, optimizers)
        try:
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
        except CheckpointException:
            assert training_digest(model, optimizers).shards == before.shards
            continue
        set_state_dict(
            model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        expected, others = _built("shards", folder, seed=0)
        _steps(expected, expected, others, range(steps))
        assert training_digest(model, optimizers) == training_digest(expected, others)
        return name
    raise AssertionError("no checkpoint could be loaded")


@pytest.mark.parametrize(("rank", "moment"), MOMENTS)
def test_a_rank_that_is_killed_while_it_saves_and_trains_spares_the_last_checkpoint(
    run_ranks, tmp_path, rank, moment
):
    died = to_death(_save_and_die, str(tmp_path), rank, moment)
    assert f"rank {rank} died with" in died
    expected = "next" if moment == "after the metadata" else "last"
    assert run_ranks(2, _goes_on, str(tmp_path)) == [expected] * 2
