"""Files and streams have the names of the model without wrappers, and all of its buffers."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from deepcompile_zero3 import (
    Zero3Error,
    fully_shard,
    load_safetensors,
    save_safetensors,
    stream_full_parameters,
    training_digest,
)


def _block():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def _model(wrap=lambda block: block):
    block = _block()
    block[1].running_mean.fill_(5.0)
    return nn.Sequential(wrap(block), nn.Linear(4, 4))


def _compile(block):
    return torch.compile(block, backend="eager")


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, _compile])
def test_wrappers_leave_names_and_buffers_as_they_are(one_rank, tmp_path, wrap):
    plain = _model()
    model = fully_shard(_model(wrap))
    streamed = dict(stream_full_parameters(model, buffers=True))
    assert sorted(streamed) == sorted(plain.state_dict())
    assert [*training_digest(model).shards] == [name for name, _ in plain.named_parameters()]
    save_safetensors(model, tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(plain.state_dict())
    for each in (fully_shard(_model(wrap)), _model()):
        [mean] = (b for name, b in each.named_buffers() if name.endswith("running_mean"))
        mean.zero_()
        load_safetensors(each, tmp_path)
        assert (mean == 5).all()


def _without_inner(module, state_dict, prefix, metadata):
    for name in [*state_dict]:
        state_dict[name.replace("inner.", "")] = state_dict.pop(name)


def test_buffers_whose_names_a_hook_changes_are_saved(one_rank, tmp_path):
    model = nn.Sequential(OrderedDict(inner=_block()))
    mean = model.inner[1].running_mean.fill_(5.0)
    model.register_state_dict_post_hook(_without_inner)
    save_safetensors(fully_shard(model), tmp_path)
    mean.zero_()
    load_safetensors(model, tmp_path)
    assert (mean == 5).all()


def _values_of_ranks(folder):
    """Saves and streams tensors that ranks have for themselves: they are those of one rank."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    own = [*model[2].parameters()]
    fully_shard(model, ignored_params={*own})
    with torch.no_grad():
        for each in (*own, *model.buffers()):
            each.fill_(dist.get_rank())
    names = [f"1.{name}" for name, _ in model[1].named_buffers()] + ["2.weight", "2.bias"]
    save_safetensors(model, folder)
    streamed = dict(stream_full_parameters(model, buffers=True))
    for found in (load_file(f"{folder}/model.safetensors"), streamed):
        assert all((found[name] == 0).all() for name in names)


def test_values_that_differ_between_ranks_are_those_of_the_first(run_ranks, tmp_path):
    run_ranks(2, _values_of_ranks, str(tmp_path))


class _SharedBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scratch", torch.arange(4.0), persistent=False)
        self.register_buffer("table", self.scratch)
        self.register_buffer("phase", torch.tensor([1 + 2j]).conj())

    def forward(self, x):
        return x * self.weight + self.table


def test_a_buffer_has_the_first_of_its_names_that_is_saved(one_rank, tmp_path):
    save_safetensors(fully_shard(_SharedBuffer()), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert sorted(saved) == ["phase", "table", "weight"]
    assert saved["phase"] == torch.tensor([1 - 2j])


@pytest.mark.parametrize(
    ("saved", "loaded", "fits"),
    [
        (torch.int64, torch.uint8, False),
        (torch.int64, torch.bool, False),
        (torch.complex64, torch.int64, False),
        (torch.int64, torch.float32, False),
        (torch.int32, torch.int64, True),
        (torch.uint16, torch.int64, True),
        (torch.int16, torch.uint16, False),
        (torch.bool, torch.uint8, True),
        (torch.float64, torch.bfloat16, True),
    ],
)
def test_numbers_that_a_dtype_lacks_are_refused(one_rank, tmp_path, saved, loaded, fits):
    save_file({"0": torch.ones(2, dtype=saved)}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.register_buffer("0", torch.zeros(2, dtype=loaded))
    if fits:
        load_safetensors(model, tmp_path)
        assert (getattr(model, "0") == 1).all()
    else:
        with pytest.raises(Zero3Error, match=f"'0' is {loaded}, and {saved} in model.safetensors"):
            load_safetensors(model, tmp_path)
