"""Small parameters that ``step_locally`` steps as one have the bits of steps of each by itself."""

import copy
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extensions import Bf16Gathered, wrap
from support.job import needs_a_job
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepcompile_zero3 import fully_shard, step_in_backward, step_locally
from deepcompile_zero3.features.optimizer_steps import local_tensors
from deepcompile_zero3.features.optimizer_steps.local_step import ELEMENTWISE
from deepcompile_zero3.torch_internals import local_tensor

OPTIMIZERS = {
    **{cls.__name__: cls for cls in ELEMENTWISE},
    **{f"{cls.__name__}, foreach": lambda p, c=cls: c(p, foreach=True) for cls in ELEMENTWISE},
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True, amsgrad=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1, fused=True),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.9),
}
SHAPES = [(32,), (3, 32), (64,), (4, 64), (8, 8), (5,), (2, 3), (), (1, 128), (80, 64)]
DTYPES = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture
def flat(monkeypatch):
    """How many parameters each step of a group has had in flat ones."""
    counts = []
    original = local_tensors.flat_parameters

    def counted(*args):
        found = original(*args)
        counts.append(sum(len(each.parameters) for each in found))
        return found

    monkeypatch.setattr(local_tensors, "flat_parameters", counted)
    return counts


class _Small(nn.Module):
    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, dtype=dtype) for shape in shapes)

    def forward(self, x):
        return sum((weight * x).square().sum() for weight in self.weights)


class _Pair:
    """A sharded model that is stepped locally, and one of plain tensors."""

    def __init__(self, make, shapes, dtype=torch.float32):
        self.models = _Small(shapes, dtype), _Small(shapes, dtype)
        fully_shard(self.models[0])
        self.optimizers = [make(model.parameters()) for model in self.models]
        step_locally(self.optimizers[0])

    def set_gradients(self, missing=()):
        for position, both in enumerate(zip(*(m.parameters() for m in self.models), strict=True)):
            value = None
            if position not in missing:
                value = torch.randn_like(both[1], dtype=both[1].grad_dtype)
            both[1].grad = value
            if value is not None:
                mesh, placements = both[0].device_mesh, both[0].placements
                value = DTensor.from_local(value.clone(), mesh, placements)
            both[0].grad = value

    def step(self, missing=()):
        self.set_gradients(missing)
        for optimizer in self.optimizers:
            optimizer.step()
        self.assert_same()

    def assert_same(self):
        for ours, theirs in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.equal(ours.to_local(), theirs)
            states = [o.state.get(p) for o, p in zip(self.optimizers, (ours, theirs), strict=True)]
            assert (states[0] is None) == (states[1] is None)
            assert (states[0] or {}).keys() == (states[1] or {}).keys()
            for key, value in (states[1] or {}).items():
                mine = states[0][key]
                mine = mine.to_local() if isinstance(mine, DTensor) else mine
                assert type(mine) is type(value), key
                torch.testing.assert_close(mine, value, rtol=0, atol=0, equal_nan=True)


@needs_a_job
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_each_by_itself(name, flat):
    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.sampled_from(SHAPES), min_size=4, max_size=12),
        st.sampled_from(DTYPES),
        st.lists(st.sets(st.integers(0, 11), max_size=2), min_size=3, max_size=5),
    )
    def check(shapes, dtype, missing):
        pair = _Pair(OPTIMIZERS[name], shapes, dtype)
        for positions in missing:
            pair.step(positions)

    check()
    assert sum(map(bool, flat)) > len(flat) / 5


@needs_a_job
def test_many_are_stepped_as_few(flat):
    pair = _Pair(torch.optim.AdamW, [(32,), (4, 64), (5,)] * 200)
    for _ in range(2):
        pair.step()
    assert flat == [400, 400]  # 5 elements are no whole vectors


@needs_a_job
@pytest.mark.parametrize("changed", ["loaded", "reset", "shared", "number", "data", "gradient"])
def test_changes_between_steps_are_seen(changed, flat):
    # torch's AdamW takes no gradients of another dtype.
    make = torch.optim.SGD if changed == "gradient" else torch.optim.AdamW
    pair = _Pair(make, [(32,)] * 9)
    for _ in range(2):
        pair.step()
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        weight = model.weights[2]
        if changed == "loaded":
            state = copy.deepcopy(optimizer.state_dict())
            state["state"][2]["exp_avg"] *= 3
            optimizer.load_state_dict(state)
        elif changed == "reset":
            del optimizer.state[weight]
        elif changed == "shared":
            optimizer.state[weight]["step"] = optimizer.state[model.weights[3]]["step"]
        elif changed == "number":
            optimizer.state[weight]["step"].data = torch.tensor(9.0)
        elif changed == "data":
            local = optimizer.state[weight]["exp_avg"]
            local = local_tensor(local) if isinstance(local, DTensor) else local
            local.data = torch.ones_like(local)
        else:
            optimizer.zero_grad()
            weight.grad_dtype = torch.bfloat16
    pair.step()
    expected = {"loaded": 9, "shared": 0, "data": 9}
    assert flat == [9, 9, expected.get(changed, 8)]
    pair.step()


@needs_a_job
def test_a_step_without_gradients_and_thawed_parameters(flat):
    pair = _Pair(torch.optim.AdamW, [(32,)] * 10)
    pair.step(missing=range(5))
    pair.step(missing=range(10))
    for _ in range(2):
        pair.step()
    assert flat == [5, 0, 10, 10]
    pair.models[0].to_empty(device="cpu")
    pair.models[1].to_empty(device="cpu")
    for model in pair.models:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    pair.step()
    assert flat[-1] == 10


@needs_a_job
@pytest.mark.parametrize("moment", ["before", "while stepping"])
def test_a_step_that_raises_keeps_shards_and_states(moment, flat):
    pair = _Pair(torch.optim.AdamW, [(32,)] * 6 + [(5,)])
    pair.step()
    pair.set_gradients()
    if moment == "before":
        pair.models[0].weights[6].grad = torch.ones(5)  # no DTensor
        error = AttributeError
    else:
        pair.optimizers[0].param_groups[0]["betas"] = None
        error = TypeError
    with pytest.raises(error):
        pair.optimizers[0].step()
    pair.optimizers[0].param_groups[0]["betas"] = pair.optimizers[1].param_groups[0]["betas"]
    for _ in range(2):
        pair.step()
    assert set(flat) == {6}


def _clip_each(optimizer, *_):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad /= parameter.grad.norm()


@needs_a_job
def test_hooks_of_steps_see_each_parameter(flat):
    pair = _Pair(torch.optim.SGD, [(32,)] * 6)
    for optimizer in pair.optimizers:
        optimizer.register_step_pre_hook(_clip_each)
    pair.step()
    assert flat == []


@needs_a_job
def test_hooks_of_all_steps_see_each_parameter(flat):
    pair = _Pair(torch.optim.SGD, [(32,)] * 6)
    hook = register_optimizer_step_pre_hook(_clip_each)
    try:
        pair.step()
    finally:
        hook.remove()
    assert flat == []
    pair.step()
    assert flat == [6]


@needs_a_job
def test_functions_around_a_step_see_each_parameter_and_schedulers_need_not(flat):
    def wrapped(parameters):
        optimizer = torch.optim.SGD(parameters, 0.1)
        step = optimizer.step

        def clip_and_step():
            _clip_each(optimizer)
            step()

        optimizer.step = clip_and_step
        return optimizer

    def scheduled(parameters):
        optimizer = torch.optim.SGD(parameters, 0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    _Pair(wrapped, [(32,)] * 6).step()
    assert flat == []
    _Pair(scheduled, [(32,)] * 6).step()
    assert flat == [6]


@needs_a_job
@pytest.mark.parametrize("shapes", [[(4, 32), (32, 4)] * 3, [(32,), (64,)] * 3])
def test_states_of_other_shapes_raise_as_without_flat_parameters(shapes, flat):
    pair = _Pair(torch.optim.AdamW, shapes)
    pair.step()
    pair.set_gradients()
    optimizer, weights = pair.optimizers[0], pair.models[0].weights
    optimizer.state[weights[0]], optimizer.state[weights[1]] = (
        optimizer.state[weights[1]],
        optimizer.state[weights[0]],
    )
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        optimizer.step()


@needs_a_job
def test_shards_of_other_classes_take_a_step_by_themselves(flat):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    for layer in model:
        wrap(layer, Bf16Gathered)
    fully_shard(model)
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step_locally(optimizer)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert flat == [0]
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert not torch.equal(parameter.full_tensor(), value)


@needs_a_job
def test_steps_in_inference_mode_and_after_it(flat):
    pair = _Pair(lambda p: torch.optim.SGD(p, 0.1), [(32,)] * 6)
    with torch.inference_mode():
        pair.step()
    pair.step()
    assert flat == [0, 6]


def _uneven():
    """Ranks have 2, 1 and no rows, of which some are whole vectors."""
    shapes = [(3, 32), (3, 5), (3, 64), (96,), (3, 32), (3, 32), (2,)]
    models = [fully_shard(_Small(shapes)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1) for model in models]
    step_locally(optimizers[1])
    for frozen in (4, 1, None):  # the first gradient comes late
        for model, optimizer in zip(models, optimizers, strict=True):
            for position, weight in enumerate(model.weights):
                weight.requires_grad_(position != frozen)
            model(torch.tensor(0.5)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    orders = []
    for model, optimizer in zip(models, optimizers, strict=True):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        orders.append([names[id(parameter)] for parameter in optimizer.state])
    assert Counter(orders[0]) == Counter(orders[1])
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        states = (o.state[p]["exp_avg"] for o, p in zip(optimizers, parameters, strict=True))
        mine, others = (state.full_tensor() for state in states)
        assert torch.equal(mine, others)
    return orders[1]


def test_ranks_may_differ_in_what_is_stepped_as_one(run_ranks):
    orders = run_ranks(3, _uneven)
    assert orders[0] == orders[1] == orders[2]


@needs_a_job
def test_buckets_that_backwards_step_have_the_same_bits(flat):
    models = [fully_shard(_Small([(32,), (4, 64)] * 8)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1) for model in models]
    step_locally(optimizers[1])
    step_in_backward(models[1], optimizers[1], bucket_mb=0.004)
    for scale in (1.0, 0.5, 2.0):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.tensor(scale)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours.to_local(), theirs.to_local())
    assert sum(flat) > 16


@needs_a_job
def test_states_of_inference_mode_raise_before_a_shard_changes():
    pair = _Pair(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), [(32,)] * 6)
    with torch.inference_mode():
        pair.step()
    pair.set_gradients()
    before = [weight.to_local().clone() for weight in pair.models[0].weights]
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        pair.optimizers[0].step()
    for weight, value in zip(pair.models[0].weights, before, strict=True):
        assert torch.equal(weight.to_local(), value)
