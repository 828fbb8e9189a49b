"""Files of safetensors: written and read by the ranks' own parts, and by others' libraries."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from features.streaming.test_stream import OF_FOUR, OF_TWO, Mixture, columns, full, owners, rows
from support.models import Stack, batch_of, compiled, either_transport, mean_square, shard
from torch import nn

from deepcompile_zero3 import Zero3Error, fully_shard, load_safetensors, save_safetensors
from deepcompile_zero3.features.streaming import save

SMALL = 1200 / 2**20  # MiB: several files


def state_of(model):
    saved = model.state_dict().keys()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: full(tensor) for name, tensor in tensors if name in saved}


def _saves(layout, folder, dtype):
    model = layout(folder)
    expected = state_of(model)
    path = Path(folder, "saved")
    save_safetensors(model, path, max_shard_mb=SMALL, dtype=dtype)
    names = sorted(os.listdir(path))
    found = {}
    for name in names:
        if name.endswith(".safetensors"):
            found |= safetensors.torch.load_file(path / name)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        wanted = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted), name
    if len(names) > 1:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(expected)
        assert {*index["weight_map"].values(), "model.safetensors.index.json"} == {*names}

    for parameter in model.parameters():
        with torch.no_grad():
            parameter.zero_()
    assert load_safetensors(model, path) == ([], [])
    for name, tensor in state_of(model).items():
        wanted = expected[name]
        if dtype and wanted.is_floating_point():
            wanted = wanted.to(dtype).to(wanted.dtype)
        assert torch.equal(tensor, wanted), name


@pytest.mark.parametrize("layout", OF_TWO)
def test_two_ranks_save_and_load(run_ranks, tmp_path, layout):
    run_ranks(2, _saves, layout, str(tmp_path), None)


@pytest.mark.parametrize("layout", [rows, columns])
def test_files_may_have_another_dtype(run_ranks, tmp_path, layout):
    run_ranks(2, _saves, layout, str(tmp_path), torch.bfloat16)


def _saves_in_blocks(layout, folder):
    with mock.patch.object(save, "_BLOCK_BYTES", 40):  # a row of a matrix, or two of them
        _saves(layout, folder, None)


@pytest.mark.parametrize("layout", [rows, columns])
def test_large_tensors_are_written_in_blocks(run_ranks, tmp_path, layout):
    run_ranks(2, _saves_in_blocks, layout, str(tmp_path))


@pytest.mark.more
@pytest.mark.parametrize("layout", OF_FOUR)
def test_four_ranks_save_and_load(run_ranks, tmp_path, layout):
    run_ranks(4, _saves, layout, str(tmp_path), None)


def save_model(folder, layout=rows):
    torch.manual_seed(3)
    model = layout(folder)
    save_safetensors(model, folder, max_shard_mb=SMALL)
    return {name: tensor.tolist() for name, tensor in state_of(model).items()}


def load_from_meta(folder, expected):
    with torch.device("meta"):
        model = Stack()
    shard(model, model.blocks)
    with pytest.raises(Zero3Error, match=r"is on the meta device: call model\.to_empty\(device="):
        load_safetensors(model, folder)
    model.to_empty(device="cpu")
    load_safetensors(model, folder)
    assert {name: tensor.tolist() for name, tensor in state_of(model).items()} == expected
    mean_square(compiled(model, "interpreted"), batch_of(4, 8)).backward()


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.more)])
@pytest.mark.parametrize("layout", [rows, columns, owners])
def test_other_numbers_of_ranks_load_into_a_model_from_meta(run_ranks, tmp_path, ranks, layout):
    expected = run_ranks(2, save_model, str(tmp_path), layout)[0]
    run_ranks(ranks, load_from_meta, str(tmp_path), expected)


def _forward_sees_loaded(folder, transport):
    model, reference = shard(Stack(), transport=transport)
    safetensors.torch.save_file(reference.state_dict(), Path(folder, "model.safetensors"))
    expected = mean_square(reference, batch_of(4, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    run = compiled(model, "interpreted")
    assert mean_square(run, batch_of(4, 8)) != expected
    load_safetensors(model, folder)
    assert mean_square(run, batch_of(4, 8)) == expected


@pytest.mark.first(transport="shared_memory")
@either_transport
def test_the_next_forward_computes_with_what_was_loaded(run_ranks, tmp_path, transport):
    run_ranks(1, _forward_sees_loaded, str(tmp_path), "auto")
    run_ranks(2, _forward_sees_loaded, str(tmp_path), transport)


# ---- transformers


def test_a_load_reshards_what_is_unsharded(one_rank, tmp_path):
    saved, model = fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))
    save_safetensors(saved, tmp_path)
    model.unshard()

    load_safetensors(model, tmp_path)

    torch.testing.assert_close(model(torch.ones(1, 4)), saved(torch.ones(1, 4)))


def _llama(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=53,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def _shard_llama(model):
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def _save_for_transformers(folder, tied, several):
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    model = _llama(tied)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _shard_llama(model)
    save_safetensors(model, folder, max_shard_mb=0.004 if several else 100)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)
        again = LlamaForCausalLM.from_pretrained(folder)
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        again.save_pretrained(Path(folder, "theirs"))
    dist.barrier()

    with torch.device("meta"):
        other = _llama(tied)
    _shard_llama(other).to_empty(device="cpu")
    load_safetensors(other, Path(folder, "theirs"))
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.more)])
@pytest.mark.parametrize("several", [True, pytest.param(False, marks=pytest.mark.more)])
def test_transformers_loads_what_ranks_have_saved_and_the_other_way_round(
    run_ranks, tmp_path, tied, several
):
    run_ranks(2, _save_for_transformers, str(tmp_path), tied, several)


# ---- wrong files


def refuses(folder, message):
    model = fully_shard(Mixture())
    before = state_of(model)
    with pytest.raises(Zero3Error, match=message):
        load_safetensors(model, folder)
    for name, tensor in state_of(model).items():
        assert torch.equal(tensor, before[name])
    dist.barrier()  # all ranks have raised


def _file(folder, **changes):
    """Saves the state of a ``Mixture`` with changes: None deletes."""
    state = Mixture().state_dict()
    del state["head.weight"]  # tied
    state |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    safetensors.torch.save_file(state, Path(folder, "model.safetensors"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm__weight": None}, r"no file has 'norm\.weight'; strict=False"),
        ({"other": torch.ones(2)}, "the model has no 'other'; strict=False"),
        (
            {"norm__bias": torch.ones(5)},
            r"'norm\.bias' has shape \[4\], and \[5\] in model\.safetensors",
        ),
        (
            {"norm__bias": torch.ones(4, dtype=torch.int8)},
            r"'norm\.bias' is torch\.float32, and torch\.int8 in model",
        ),
        (
            {"norm__bias": torch.ones(5), "other": torch.ones(2), "scale": None},
            r"'norm\.bias' has shape .*; no file has 'scale'; the model has no 'other'",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_before_a_shard_changes(
    run_ranks, tmp_path, changes, message
):
    _file(tmp_path, **changes)
    run_ranks(2, refuses, str(tmp_path), message)


def _loads_the_rest(folder):
    model = fully_shard(Mixture())
    found = load_safetensors(model, folder, strict=False)
    assert found.missing_keys == ["norm.weight"]
    assert found.unexpected_keys == ["other"]
    assert model.scale.full_tensor() == 7


def test_names_are_ignored_if_not_strict(run_ranks, tmp_path):
    _file(tmp_path, norm__weight=None, other=torch.ones(2), scale=torch.tensor(7.0))
    run_ranks(2, _loads_the_rest, str(tmp_path))


def test_a_folder_without_files_is_refused(run_ranks, tmp_path):
    run_ranks(2, refuses, str(tmp_path), "has neither model.safetensors nor model.safetensors.in")


def test_files_that_are_missing_or_cut_off_are_refused(run_ranks, tmp_path):
    run_ranks(2, save_model, str(tmp_path))
    part = sorted(tmp_path.glob("model-*.safetensors"))[0]
    os.truncate(part, part.stat().st_size - 4)
    run_ranks(2, refuses, str(tmp_path), "model-00001-of-.* was cut off: 'blocks.* ends at byte")
    os.truncate(part, 20)
    run_ranks(2, refuses, str(tmp_path), "model-00001-of-.* is no safetensors file, or was cut")
    part.unlink()
    run_ranks(2, refuses, str(tmp_path), "names model-00001-of-.*, and there is no such file")


def _wrong_rank_sees_no_file(folder):
    if dist.get_rank() == 1:
        folder += "/elsewhere"
    refuses(folder, r"load_safetensors, rank 1: .*elsewhere has neither")


def test_an_error_of_one_rank_is_raised_on_all(run_ranks, tmp_path):
    _file(tmp_path)
    run_ranks(2, _wrong_rank_sees_no_file, str(tmp_path))


def test_wrong_arguments_are_refused(one_rank, tmp_path):
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_shard_mb is a positive number of MiB"):
        save_safetensors(model, tmp_path, max_shard_mb=-1)
    with pytest.raises(TypeError, match=r"dtype is a floating torch\.dtype"):
        save_safetensors(model, tmp_path, dtype=torch.int8)
    with pytest.raises(ValueError, match="strict must be a bool"):
        load_safetensors(model, tmp_path, strict="no")
    model.register_buffer("phases", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(Zero3Error, match=r"'phases' is torch\.complex128, .*: convert it"):
        save_safetensors(model, tmp_path)
