"""Checkpoints: saved and loaded with different numbers of ranks, with FSDP2, and as plain files.

A parameter is identified by its FQN, never by its position.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.models import INDUCTOR_TOO, Block, batch_of, compiled, each_way, mine
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from deepcompile_zero3 import fully_shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Mixed(nn.Module):
    """Parameters of one shape, in two dtypes, registered in either order."""

    def __init__(self, backwards=False):
        super().__init__()
        low = {"low": lambda: nn.Linear(6, 6).bfloat16()}
        high = {"high": lambda: nn.Linear(6, 6), "block": lambda: Block(6)}
        parts = list({**low, **high}.items())
        for name, build in reversed(parts) if backwards else parts:
            setattr(self, name, build())

    def forward(self, x):
        return self.block(self.high(self.low(x.bfloat16()).float()))


def _built(how, *, seed, backwards=False):
    """Returns a model with values of ``seed``, its callable, and its optimizer."""
    torch.manual_seed(seed)
    model = Mixed(backwards)
    shard = torch_fully_shard if how == "fsdp2" else fully_shard
    if how != "whole":
        if how == "fsdp2":  # FSDP2 requires one dtype in a group
            shard(model.low)
        shard(model.block)
        shard(model)
    run = model if how in ("fsdp2", "whole") else compiled(model, how)
    return model, run, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def _steps(run, optimizer, steps):
    """Returns the losses of the whole batch."""
    losses = []
    for step in steps:
        loss = run(mine(batch_of(8, 6, seed=step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def _values(model, optimizer):
    """Returns every parameter and moment, unsharded, by name."""
    values = {}
    for fqn, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        for key, tensor in (("", parameter), *sorted(moments.items())):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            values[fqn, key] = whole.detach().clone()
    return values


def _save(how, folder, in_background):
    model, run, optimizer = _built(how, seed=0)
    _steps(run, optimizer, range(3))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if in_background:
        # Saves in its own group, since its thread communicates while this thread trains.
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
    else:
        dcp.save(state, checkpoint_id=folder)
    values = _values(model, optimizer)
    losses = _steps(run, optimizer, range(3, 6))
    if in_background:
        saving.result()
    return values, losses, _values(model, optimizer)


def _resume(how, folder, backwards=False):
    model, run, optimizer = _built(how, seed=1, backwards=backwards)
    if how not in ("fsdp2", "whole"):
        run(mine(batch_of(8, 6)))  # compiles and gathers other values first
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    values = _values(model, optimizer)
    return values, _steps(run, optimizer, range(3, 6)), _values(model, optimizer)


def _assert_equal(values, expected):
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("how", "in_background"),
    [
        ("interpreted", True),
        pytest.param("eager", False, marks=pytest.mark.long),
        pytest.param("eager", True, marks=pytest.mark.long),
        pytest.param("interpreted", False, marks=pytest.mark.long),
        pytest.param("zero3", True, marks=INDUCTOR_TOO),
    ],
)
def test_a_run_of_four_ranks_goes_on_with_any_number(run_ranks, tmp_path, how, in_background):
    folder = str(tmp_path)
    saved, losses, final = run_ranks(4, _save, how, folder, in_background)[0]

    for values, resumed, ended in run_ranks(4, _resume, how, folder):
        _assert_equal(values, saved)
        assert resumed == losses  # bit for bit
        _assert_equal(ended, final)
    for world_size, other in ((2, how), (1, how), (2, "fsdp2")):
        for values, resumed, _ in run_ranks(world_size, _resume, other, folder):
            _assert_equal(values, saved)
            assert resumed == pytest.approx(losses, rel=1e-2)  # two layers compute in bf16


@pytest.mark.first(how="interpreted")
@each_way
def test_a_run_of_fsdp2_goes_on(run_ranks, tmp_path, how):
    saved, losses, _ = run_ranks(2, _save, "fsdp2", str(tmp_path), False)[0]
    for values, resumed, _ in run_ranks(2, _resume, how, str(tmp_path)):
        _assert_equal(values, saved)
        assert resumed == pytest.approx(losses, rel=1e-2)


@pytest.mark.first(how="eager")
@each_way
def test_parameters_registered_in_another_order_load_by_name(run_ranks, tmp_path, how):
    saved, losses, _ = run_ranks(2, _save, how, str(tmp_path), False)[0]
    for values, resumed, _ in run_ranks(2, _resume, how, str(tmp_path), True):
        _assert_equal(values, saved)
        assert resumed == pytest.approx(losses, rel=1e-2)


def _to_files(how, folder):
    """Writes one unsharded file of each kind, on rank 0."""
    model, run, optimizer = _built(how, seed=0)
    _steps(run, optimizer, range(3))
    state, moments = get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        save_file(state, f"{folder}/model.safetensors")
        torch.save(moments, f"{folder}/optimizer.pt")
    else:
        assert not state
    return _values(model, optimizer)


def _from_files(how, folder):
    """Resumes like ``_resume``, but only rank 0 reads files."""
    model, _, optimizer = _built(how, seed=1)
    first = dist.get_rank() == 0
    state = load_file(f"{folder}/model.safetensors") if first else {}
    moments = torch.load(f"{folder}/optimizer.pt") if first else {}
    whole = how == "whole"
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not whole)
    set_model_state_dict(model, state, options=options)
    set_optimizer_state_dict(model, optimizer, moments, options=options)
    return _values(model, optimizer)


@each_way
def test_plain_files_lead_to_one_process_and_back(run_ranks, tmp_path, how):
    saved = run_ranks(2, _to_files, how, str(tmp_path))[0]
    _assert_equal(run_ranks(1, _from_files, "whole", str(tmp_path))[0], saved)
    for values in run_ranks(2, _from_files, how, str(tmp_path)):
        _assert_equal(values, saved)


def _of_plain_modules(how, folder):
    """Loads a file that ``torch.save(model.state_dict())`` wrote in plain PyTorch."""
    torch.manual_seed(0)
    whole = Mixed()
    if dist.get_rank() == 0:
        torch.save(whole.state_dict(), f"{folder}/plain.pt")
    dist.barrier()
    model, _, _ = _built(how, seed=1)
    set_model_state_dict(
        model,
        torch.load(f"{folder}/plain.pt", mmap=True),
        options=StateDictOptions(full_state_dict=True),
    )
    loaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        _assert_equal(loaded, whole.state_dict())


def test_a_state_dict_of_plain_modules_is_loaded(run_ranks, tmp_path):
    run_ranks(2, _of_plain_modules, "eager", str(tmp_path))
