"""The feature of docs/extending.md, which stands outside of the package, trains."""

import re

import pytest
import torch
from support.models import batch_of, compiled, each_way, shard
from support.paths import ROOT
from torch import nn

from deepcompile_zero3 import Zero3Error, clip_grad_norm_


def _feature():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)
    assert len(code.splitlines()) <= 60
    names = {}
    exec(code, names)
    return names["SignSteps"]


def _train(how):
    layers = [nn.Linear(16, 16) for _ in range(3)]
    model, reference = shard(nn.Sequential(*layers), layers)
    steps = _feature()(model, lr=0.5)
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
