"""The feature and the transport of docs/extending.md, which stand outside of the package, train."""

import os
import re
from unittest import mock

import pytest
import torch
from support.models import Stack, assert_same_steps, batch_of, compiled, each_way, shard
from support.paths import ROOT
from torch import nn

from deepcompile_zero3 import Zero3Error, clip_grad_norm_, fully_shard
from deepcompile_zero3.sharding.module_parameters import registered_in
from deepcompile_zero3.transport.choice import OTHERS


def _run_code(position, **names):
    """Runs a block of code of the document, and returns its names."""
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)
    assert len(codes) == 2
    assert len(codes[position].splitlines()) <= 60
    exec(codes[position], names)
    return names


def _train(how):
    layers = [nn.Linear(16, 16) for _ in range(3)]
    model, reference = shard(nn.Sequential(*layers), layers)
    steps = _run_code(0)["SignSteps"](model, lr=0.5)
    run, batch = compiled(model, how), batch_of(8, 16)
    for _ in range(2):
        run(batch).square().mean().backward()
        reference(batch).square().mean().backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.sub_(parameter.grad.sign(), alpha=0.5)
        reference.zero_grad()
    assert steps.steps == 2
    for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is None
        assert torch.equal(mine.full_tensor(), whole)
    with pytest.raises(Zero3Error, match="SignSteps takes the gradient of"):
        clip_grad_norm_(model.parameters(), 1.0)


@each_way
def test_the_feature_of_the_document_trains(run_ranks, how):
    run_ranks(2, _train, how)


@mock.patch.dict(OTHERS)
@mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=str(ROOT / "build" / "extensions"))
def _train_over_files(folder):
    _run_code(1, CHECKOUT=str(ROOT), FOLDER=folder)
    for how in ("eager", "interpreted"):
        model = Stack()
        model, reference = shard(model, model.blocks, transport="files")
        assert {p.handle.transport.name for p in registered_in(model)} == {"files"}
        assert_same_steps(model, reference, how, 8, 8)
    with pytest.raises(ValueError, match=r"one of 'auto', .*'files', got 'pigeons'"):
        fully_shard(Stack(), transport="pigeons")


@pytest.mark.long
def test_the_transport_of_the_document_trains(run_ranks, tmp_path):
    run_ranks(2, _train_over_files, str(tmp_path), timeout=400)
    assert {path.name.partition(" ")[0] for path in tmp_path.iterdir()} == {"gather", "reduce"}
