"""A warning of parameters that each rank trains by itself."""

import warnings

import pytest
import torch
from support.models import Stack, batch_of, mean_square, mine
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import fully_shard


def _step(model, *, to_shard=(), ignored=(), steps=1):
    """Returns the warnings of an optimizer of a model of which only some modules are sharded."""
    for module in to_shard:
        fully_shard(module, ignored_params=set(ignored))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            mean_square(model, mine(batch_of(4, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [each for each in told if "fully_shard" in str(each.message)]
    assert all(each.filename == __file__ for each in found), found
    return [str(each.message) for each in found]


def _with_head():
    return nn.Sequential(Stack(), nn.Linear(8, 8))


def _told():
    model = _with_head()
    (message,) = _step(model, to_shard=[model[0]], steps=3)
    return message


def test_a_head_that_nobody_shards_is_told_once(run_ranks):
    for message in run_ranks(2, _told):
        assert "the SGD steps shards, and 2 of the parameters" in message
        assert "of shapes [8, 8]; [8]. " in message


def _not_told(which):
    model = _with_head()
    if which == "sharded":
        return _step(model, to_shard=[model[0], model])
    if which == "ignored":
        told = _step(model, to_shard=[model[0], model], ignored=list(model[1].parameters()))
        assert not isinstance(model[1].weight, DTensor)
        return told
    if which == "ignored, from meta":
        with torch.device("meta"):
            model = _with_head()
        ignored = set(model[1].parameters())
        for module in (model[0], model):
            fully_shard(module, ignored_params=ignored)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        assert ignored.isdisjoint(model.parameters())
        return _step(model)
    if which == "frozen":
        model[1].requires_grad_(False)
        return _step(model, to_shard=[model[0]])
    return _step(model)


@pytest.mark.parametrize("which", ["sharded", "ignored", "ignored, from meta", "frozen", "plain"])
def test_others_are_told_nothing(run_ranks, which):
    assert run_ranks(2, _not_told, which) == [[], []]


def _of_one_rank():
    model = _with_head()
    return _step(model, to_shard=[model[0]])


def test_one_rank_has_no_others(run_ranks):
    assert run_ranks(1, _of_one_rank) == [[]]
