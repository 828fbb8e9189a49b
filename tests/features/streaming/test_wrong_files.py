"""Files that are no safetensors files are refused by name, before a shard changes."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deepcompile_zero3 import Zero3Error, fully_shard, load_safetensors


def _rewrite_header(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data_offsets", [0, 16], "'weight' begins at byte .*, and what is before it ends at"),
        ("data_offsets", [48, 64], "'weight' ends at byte"),
        ("data_offsets", [16.0, 32.0], r"'weight' has shape \[2, 2\] and bytes 16.0 to 32.0"),
        ("shape", [2.0, 2.0], r"'weight' has shape \[2.0, 2.0\]"),
        ("shape", [-2, -2], r"'weight' has shape \[-2, -2\]"),
        ("dtype", "F4", "'weight' is F4, which is no dtype of torch"),
    ],
)
def test_a_header_that_is_wrong_is_refused(one_rank, tmp_path, key, value, message):
    model = fully_shard(nn.Linear(2, 2))
    before = model.weight.full_tensor().clone()
    path = tmp_path / "model.safetensors"
    tensors = {"bias": torch.ones(4), "weight": torch.ones(2, 2)}
    save_file(tensors, path)
    _rewrite_header(path, lambda header: header["weight"].update({key: value}))
    with pytest.raises(Zero3Error, match=rf"model\.safetensors.*{message}"):
        load_safetensors(model, tmp_path, strict=False)
    assert torch.equal(model.weight.full_tensor(), before)


def test_bytes_behind_the_last_tensor_are_refused(one_rank, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"bias": torch.ones(2), "weight": torch.ones(2, 2)}, path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(Zero3Error, match="and its tensors end at byte"):
        load_safetensors(fully_shard(nn.Linear(2, 2)), tmp_path)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": None}, {"weight_map": {"weight": 3}}])
def test_an_index_that_is_none_is_refused(one_rank, tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Zero3Error, match=r"index\.json is no index of safetensors files"):
        load_safetensors(fully_shard(nn.Linear(2, 2)), tmp_path)


def test_a_buffer_whose_elements_share_memory_is_refused(one_rank, tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(1, 2).expand(3, 2))
    fully_shard(model)
    tensors = {"bias": torch.ones(2), "weight": torch.ones(2, 2), "mask": torch.ones(3, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Zero3Error, match=r"elements of 'mask' share memory: .* clone"):
        load_safetensors(model, tmp_path)
    assert not torch.equal(model.weight.full_tensor(), torch.ones(2, 2))
    del tensors["mask"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_safetensors(model, tmp_path, strict=False).missing_keys == ["mask"]
    assert torch.equal(model.weight.full_tensor(), torch.ones(2, 2))
