"""Modules that keep a parameter in an attribute of their own, at any depth."""

import collections
import dataclasses
import types
import weakref

import pytest
import torch
from support.models import Stack, batch_of
from torch import nn

from deepcompile_zero3 import Zero3Error, fully_shard

pytestmark = pytest.mark.usefixtures("one_rank")


@dataclasses.dataclass
class _Plain:
    value: object


@dataclasses.dataclass(slots=True)
class _Slots:
    value: object


class _Held(nn.Linear):
    """A layer that holds its weight in a container too."""

    def __init__(self, hold):
        super().__init__(4, 4)
        self.held = hold(self.weight)


HELD = {
    "a list in a dict": (lambda w: {"q": [w]}, r"self.held\['q'\]\[0\], "),
    "a deque": (lambda w: collections.deque([(w,)]), r"self.held\[0\]\[0\], "),
    "a set": (lambda w: [{w}], r"self.held\[0\], "),
    "a dataclass": (lambda w: [_Plain(w)], r"self.held\[0\].value, "),
    "slots": (lambda w: _Slots({1: w}), r"self.held.value\[1\], "),
    "a namespace": (lambda w: types.SimpleNamespace(w=[w]), r"self.held.w\[0\], "),
}


@pytest.mark.parametrize(("hold", "place"), HELD.values(), ids=HELD)
def test_a_reference_is_refused_with_its_place_and_what_to_do(hold, place):
    model = nn.Sequential(nn.Linear(4, 4), _Held(hold))
    message = rf"'1' \(_Held\) keeps .*'1.weight' in {place}.*read self.weight in forward instead"
    with pytest.raises(Zero3Error, match=message):
        fully_shard(model)
    assert type(model[1]) is _Held


class _Decoder(nn.Module):
    """Reads the weight of an embedding that it does not register."""

    def __init__(self, embedding):
        super().__init__()
        self.shared = [embedding.weight]
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x @ self.shared[0].T + self.bias


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.decoder = _Decoder(self.embedding)

    def forward(self, tokens):
        return self.decoder(self.embedding(tokens))


@pytest.mark.parametrize("first", [None, "embedding", "decoder"])
def test_a_reference_to_a_parameter_of_another_module_is_refused(first):
    model = _Tied()
    if first:
        fully_shard(getattr(model, first))
    message = (
        r"'decoder' \(_Decoder\) keeps .*'embedding.weight' in self.shared\[0\].*keep .*"
        "'embedding', and read its 'weight'.*ignored_params of the call that shards it"
    )
    with pytest.raises(Zero3Error, match=message):
        fully_shard(model)


class _TiedToOthers(nn.Module):
    """Has blocks that refer to the model and to each other, and are tied to a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.blocks[0].weight
        for block, other in zip(self.blocks, reversed(self.blocks), strict=True):
            block.others = [self, other, self.head]

    def forward(self, x):
        return self.head(self.blocks[1](self.blocks[0](x)))


def test_blocks_may_refer_to_modules_that_a_later_call_shards():
    model = _TiedToOthers()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)(batch_of(2, 8)).sum().backward()
    assert model.head._parameters["weight"] is model.blocks[0]._parameters["weight"]


def test_ignored_parameters_may_be_held():
    model = _Tied()
    fully_shard(model, ignored_params={model.embedding.weight})
    model(torch.arange(4)).sum().backward()
    assert model.embedding.weight.grad is not None


class _NoRepr:
    def __repr__(self):
        raise AssertionError


class _Harmless(nn.Module):
    """Holds modules, other tensors and objects that must not be asked for anything."""

    def __init__(self):
        super().__init__()
        self.stack = Stack()
        self.stack.blocks[0].__dict__["parents"] = [self]
        self.others = {"scale": torch.ones(()), "free": nn.Parameter(torch.ones(2))}
        self.others["others"] = self.others
        gone = _Plain(3)
        self.proxies = [weakref.proxy(gone)]
        self.by_object = {_NoRepr(): 3}
        self.vocabulary = {str(i): i for i in range(1000)}
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    @property
    def broken(self):
        raise AssertionError

    def forward(self, x):
        return self.stack(x)


def test_what_does_not_go_stale_is_not_refused():
    model = _Harmless()
    for block in model.stack.blocks:
        fully_shard(block)
    fully_shard(model)(batch_of(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_search_that_ends_early_is_told_once_by_name(caplog):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].vocabulary = {str(i): i for i in range(100_001)}
    model[0].small = [*range(1000)]
    for each in (model[0], model):
        fully_shard(each)
    model = fully_shard(nn.Sequential(model))
    (told,) = caplog.messages
    assert told.startswith("a Linear has more than 100000 objects in self.vocabulary: ")
