"""What a policy of mixed precision leaves as it is when it casts arguments and outputs."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from support.models import batch_of, compiled, each_way
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import register_pytree_node
from transformers.modeling_outputs import BaseModelOutput

from deepcompile_zero3 import fully_shard

pytestmark = pytest.mark.usefixtures("one_rank")

IN_BF16 = MixedPrecisionPolicy(torch.bfloat16)


class _Registered:
    """A container that is registered with pytree."""

    def __init__(self, *items):
        self.items = list(items)

    def append(self, item):
        self.items.append(item)

    def __iter__(self):
        return iter(self.items)


register_pytree_node(
    _Registered, lambda each: (each.items, None), lambda items, _: _Registered(*items)
)


class _Appends(nn.Linear):
    """A block that computes with what it has seen, and notes it in the caller's cache."""

    def forward(self, x, cache):
        cache.append(super().forward(x))
        return sum(cache)


@each_way
@pytest.mark.parametrize("kind", [list, collections.deque, _Registered])
def test_a_block_writes_into_the_cache_of_its_caller(how, kind):
    block = fully_shard(_Appends(4, 4), mp_policy=IN_BF16)
    run = compiled(block, how, fullgraph=True)
    cache = kind()
    first = run(batch_of(2, 4), cache)
    (seen,) = cache
    assert torch.equal(seen, first)
    second = run(batch_of(2, 4), cache)
    assert len([*cache]) == 2
    assert torch.equal(second, 2 * first)


@dataclasses.dataclass
class _Record:
    x: Any
    step: int = 0
    state: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True)
class _Frozen:
    x: Any
    step: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Slots:
    x: Any
    step: int = 0


class _Dict(dict):
    def __init__(self, name, **items):
        super().__init__(**items)
        self.name = name


class _List(list):
    pass


class _Tuple(tuple):
    pass


class _Named(NamedTuple):
    x: torch.Tensor
    step: int


def _record(x):
    record = _Record(x, 3)
    record.state = [x, "begun"]
    record.unknown = "kept"
    return record


def _with_attributes(value):
    value.unknown = "kept"
    return value


MADE = {
    "dataclass": _record,
    "frozen": lambda x: _with_attribute_of_frozen(_Frozen([x], 3)),
    "slots": lambda x: _Slots({"x": x}, 3),
    "nested": lambda x: _Frozen(_record((x, _Slots(x)))),
    "dict": lambda x: {"x": x, "step": 3},
    "dict subclass": lambda x: _with_attributes(_Dict("one", x=x)),
    "OrderedDict": lambda x: collections.OrderedDict(b=x, a=[x]),
    "defaultdict": lambda x: collections.defaultdict(list, x=x),
    "deque": lambda x: collections.deque([x, 3]),
    "list subclass": lambda x: _with_attributes(_List([x, 3])),
    "tuple subclass": lambda x: _with_attributes(_Tuple([x, 3])),
    "namedtuple": lambda x: _Named(x, 3),
    "result of torch": lambda x: x.max(0),
    "ModelOutput": lambda x: _with_attributes(BaseModelOutput(x, hidden_states=(x, x))),
    "registered": lambda x: _Registered(x, 3),
}


def _with_attribute_of_frozen(value):
    object.__setattr__(value, "unknown", "kept")
    return value


def _assert_same(actual, expected, dtype):
    """Compares all that the objects hold; floating tensors of ``actual`` are of ``dtype``."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        if expected.is_floating_point():
            expected = expected.to(dtype)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
        return
    if isinstance(expected, collections.defaultdict):
        assert actual.default_factory is expected.default_factory
    if isinstance(expected, dict):
        assert [*actual] == [*expected]
        for key in expected:
            _assert_same(actual[key], expected[key], dtype)
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            _assert_same(one, other, dtype)
    elif not hasattr(expected, "__dict__") and not dataclasses.is_dataclass(expected):
        assert actual == expected
    attributes = [*vars(expected)] if hasattr(expected, "__dict__") else []
    if dataclasses.is_dataclass(expected):
        attributes += [field.name for field in dataclasses.fields(expected)]
    for name in attributes:
        _assert_same(getattr(actual, name), getattr(expected, name), dtype)


class _Returns(nn.Linear):
    """A block that returns what it gets, in bfloat16, and whether it is what was given."""

    def forward(self, value, x):
        return value, super().forward(x)


@pytest.mark.thin
@pytest.mark.parametrize("how", ["eager", "interpreted"])
@pytest.mark.parametrize("kind", MADE)
def test_a_cast_changes_tensors_and_nothing_else(how, kind):
    block = fully_shard(_Returns(4, 4), mp_policy=IN_BF16)
    run = compiled(block, how, fullgraph=True)
    given, untouched = MADE[kind](batch_of(2, 4)), MADE[kind](batch_of(2, 4))
    actual, _ = run(given, batch_of(2, 4))
    _assert_same(actual, MADE[kind](batch_of(2, 4)), torch.bfloat16)
    _assert_same(given, untouched, torch.float32)
    same = MADE[kind](batch_of(2, 4).bfloat16())
    assert run(same, batch_of(2, 4))[0] is same


@pytest.mark.parametrize("how", ["eager", "interpreted"])
@pytest.mark.parametrize("kind", ["dataclass", "dict subclass", "ModelOutput"])
def test_so_it_is_with_outputs(how, kind):
    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    block = fully_shard(_Returns(4, 4), mp_policy=policy)
    actual, _ = compiled(block, how, fullgraph=True)(MADE[kind](batch_of(2, 4)), batch_of(2, 4))
    _assert_same(actual, MADE[kind](batch_of(2, 4)), torch.bfloat16)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_tensors_in_sets_are_cast(kind):  # Dynamo takes no sets of tensors
    block = fully_shard(_Returns(4, 4), mp_policy=IN_BF16)
    given = kind([batch_of(2, 4), "one"])
    actual, _ = block(given, batch_of(2, 4))
    assert type(actual) is kind
    assert {getattr(each, "dtype", each) for each in actual} == {torch.bfloat16, "one"}
    assert {getattr(each, "dtype", each) for each in given} == {torch.float32, "one"}
    assert block(actual, batch_of(2, 4))[0] is actual


def test_a_deque_keeps_its_maximum():  # Dynamo forgets that of any deque which a graph returns
    block = fully_shard(_Returns(4, 4), mp_policy=IN_BF16)
    (actual, _) = block(collections.deque([batch_of(2, 4)], maxlen=2), batch_of(2, 4))
    assert actual[0].dtype == torch.bfloat16
    assert actual.maxlen == 2


def test_containers_may_contain_themselves():
    block = fully_shard(_Returns(4, 4), mp_policy=IN_BF16)
    for x in (batch_of(2, 4), batch_of(2, 4).bfloat16()):
        items = [x]
        items.append((items, {"items": items}))
        record = _Record(items)
        record.state = record
        actual, _ = block(record, x)
        assert actual.state is actual
        assert actual.x[0].dtype == torch.bfloat16
        assert actual.x[1][0] is actual.x[1][1]["items"] is actual.x
        assert (actual is record) == (actual.x is items) == (x.dtype == torch.bfloat16)


class _AddsToFirst(nn.Linear):
    """A block that writes to one of its arguments, and reads others."""

    def forward(self, x, others):
        x.add_(1)
        return super().forward(x) + others["x"][0], others["x"] is others["again"]


@each_way
def test_what_is_given_twice_is_one_thing_in_the_forward(how):
    block = fully_shard(_AddsToFirst(4, 4), mp_policy=IN_BF16)
    x, weight = batch_of(2, 4), block.weight.full_tensor().detach()
    items = [x]
    output, is_one = compiled(block, how, fullgraph=True)(x, {"x": items, "again": items})
    assert is_one
    expected = (x + 1) @ weight.T + block.bias.full_tensor() + x + 1
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)


def test_containers_that_are_shared_take_no_time_that_doubles_with_depth():
    block = fully_shard(_Returns(4, 4), mp_policy=IN_BF16)
    for x in (batch_of(2, 4), batch_of(2, 4).bfloat16()):
        shared = [x]
        for _ in range(60):
            shared = [shared, (shared,)]
        actual, _ = block(shared, x)
        for _ in range(60):
            assert actual[0] is actual[1][0]
            actual = actual[0]
        assert actual[0].dtype == torch.bfloat16
