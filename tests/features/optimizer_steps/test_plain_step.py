"""torch's elementwise optimizers step local tensors without being asked, where nobody looks."""

import copy
import functools
import gc
import importlib
import weakref

import pytest
import torch
from support.job import needs_a_job
from support.mesh_models import replicas
from support.models import Stack, batch_of, mean_square, mine
from support.optimizer_models import OPTIMIZERS, assert_same, two
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, zeros
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.features.optimizer_steps.plain_step import may_take, take
from deepcompile_zero3.tools.tracing.trace import Steps
from deepcompile_zero3.torch_internals import local_tensor

_ADAM = importlib.import_module("torch.optim.adam")  # torch.optim hides it


class _Dispatches(TorchDispatchMode):
    """Counts operators on DTensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += any(issubclass(each, DTensor) for each in types)
        return operator(*args, **(kwargs or {}))


def _dispatches(optimizer, *args):
    with _Dispatches() as seen:
        optimizer.step(*args)
    return seen.count


def _steps(name):
    models, optimizers, plain = two(OPTIMIZERS[name], replicas() if name == "sgd" else None)
    for seed in range(3):
        for model, optimizer, parameter in zip(models, optimizers, plain, strict=True):
            mean_square(model, mine(batch_of(12, 8, seed=seed))).backward()
            parameter.grad = torch.full([2], 0.1 + seed)
            assert (_dispatches(optimizer) > 0) == (optimizer is optimizers[0])
            assert all(p.grad is not None for p in model.stack.parameters())
            optimizer.zero_grad()
        assert_same(models, optimizers, plain)
        if seed == 1:
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


# Kernels of one class, replicas, and states of several kinds. The others are stepped likewise.
@pytest.mark.first(name=("adamw, foreach", "adamw, fused", "sgd", "ASGD"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_steps_on_dtensors(run_ranks, name):
    run_ranks(4 if name == "sgd" else 3, _steps, name)


def _model_and_optimizer(**settings):
    model = fully_shard(Stack())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, **settings)
    mean_square(model, batch_of(2, 8)).backward()
    return model, optimizer


class _Subclass(torch.optim.AdamW):
    """May have a method of its own that looks at parameters."""


@needs_a_job
def test_dtensors_are_stepped_where_somebody_looks():
    model, optimizer = _model_and_optimizer()
    assert _dispatches(optimizer) == 0
    seen = []
    handle = optimizer.register_step_pre_hook(lambda *args: seen.append(args[1][0]))
    assert _dispatches(optimizer) > 0
    assert seen[0] is optimizer
    handle.remove()
    handle = register_optimizer_step_pre_hook(lambda *args: None)
    assert _dispatches(optimizer) > 0
    handle.remove()
    assert _dispatches(optimizer) == 0
    assert _dispatches(_Subclass(model.parameters(), 0.1)) > 0
    model, optimizer = _model_and_optimizer(differentiable=True)
    assert not may_take(optimizer)
    model, optimizer = _model_and_optimizer(fused=True)
    optimizer.grad_scale = torch.tensor(2.0)  # as a GradScaler says
    optimizer.found_inf = torch.tensor(0.0)
    assert _dispatches(optimizer) > 0


@needs_a_job
def test_gradients_and_states_of_other_parts_are_left_to_dtensor():
    model, optimizer = _model_and_optimizer()
    weight = model.head.weight
    partial = DTensor.from_local(torch.ones(weight.shape), weight.device_mesh, [Partial()])
    whole = weight.grad
    weight.grad = partial
    assert _dispatches(optimizer) > 0
    weight.grad = whole
    assert _dispatches(optimizer) == 0
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].full_tensor()
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        optimizer.step()


@needs_a_job
def test_optimizers_of_other_dtensors_are_left_alone():
    model, _ = _model_and_optimizer()
    theirs = nn.Parameter(zeros(4, device_mesh=model.head.weight.device_mesh))
    theirs.grad = torch.ones_like(theirs)
    assert _dispatches(torch.optim.AdamW([theirs])) > 0
    both = torch.optim.AdamW([theirs, model.head.weight])
    assert _dispatches(both) > 0
    del both.param_groups[0]["params"][0]
    assert _dispatches(both) == 0


@needs_a_job
def test_a_step_that_raises_keeps_what_it_has_changed(monkeypatch):
    model = fully_shard(Stack())
    groups = [{"params": model.head.parameters()}, {"params": model.blocks.parameters()}]
    optimizer = torch.optim.AdamW(groups, 0.1)
    mean_square(model, batch_of(2, 8)).backward()
    whole = _ADAM._single_tensor_adam
    seen = []

    def fail_at_the_second(*args, **kwargs):
        seen.append(args)
        if len(seen) == 2:
            raise RuntimeError("no memory")
        whole(*args, **kwargs)

    monkeypatch.setattr(_ADAM, "_single_tensor_adam", fail_at_the_second)
    before = model.head.weight.to_local().clone()
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()
    assert not torch.equal(before, model.head.weight.to_local())
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert _dispatches(optimizer) == 0
    steps = [
        optimizer.state[p]["step"].item() for p in (model.head.weight, model.blocks[0].up.bias)
    ]
    assert steps == [2, 1]
    assert all(isinstance(key, DTensor) for key in optimizer.state)
    seen.clear()
    gradient = weakref.ref(local_tensor(model.head.weight.grad))
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None


@needs_a_job
def test_attributes_of_the_optimizer_are_seen_by_its_step_and_its_hooks_after_it():
    model, optimizer = _model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in range(2):
        before = model.head.bias.to_local().clone()
        assert _dispatches(optimizer) == 0
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (step + 1)
        assert not torch.equal(before, model.head.bias.to_local())


@needs_a_job
def test_states_are_in_the_order_of_the_groups():
    model = fully_shard(Stack())
    plain = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [plain]}, {"params": model.parameters()}], 0.1)
    mean_square(model, batch_of(2, 8)).backward()
    plain.grad = torch.ones(2)
    assert _dispatches(optimizer) == 0
    assert list(map(id, optimizer.state)) == [id(plain), *map(id, model.parameters())]


@needs_a_job
def test_writes_of_a_step_count_as_dtensors_count_them():
    model, optimizer = _model_and_optimizer()
    weight = model.head.weight
    local = weight.to_local()
    optimizer.step()
    moment = optimizer.state[weight]["exp_avg"]
    counts = local._version, moment._version
    saved = (moment * moment.detach().requires_grad_()).sum()
    optimizer.step()
    assert (local._version, moment._version > counts[1]) == (counts[0], True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@needs_a_job
def test_methods_of_others_are_called_with_dtensors():
    _, optimizer = _model_and_optimizer()
    own = optimizer._init_group
    optimizer._init_group = lambda *args: own(*args)
    assert _dispatches(optimizer) > 0
    assert all(isinstance(key, DTensor) for key in optimizer.state)
    del optimizer._init_group
    assert _dispatches(optimizer) == 0


@needs_a_job
@pytest.mark.parametrize("name", ["step", "_init_group", "adam"])
def test_functions_that_wrap_torchs_are_called_with_dtensors(monkeypatch, name):
    _, optimizer = _model_and_optimizer()
    place = _ADAM if name == "adam" else torch.optim.AdamW
    whole = getattr(place, name)
    whole = getattr(whole, "__wrapped__", whole) if name == "step" else whole  # without hooks
    calls = []

    @functools.wraps(whole)
    def wrapper(*args, **kwargs):
        calls.append(args)
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, wrapper)
        assert _dispatches(torch.optim.AdamW(optimizer.param_groups)) > 0
        assert len(calls) == 1
    assert _dispatches(optimizer) == 0


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * self.scale


@needs_a_job
def test_a_plain_gradient_of_a_scalar_is_stepped():
    model = fully_shard(_Scale())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.scale.grad = torch.tensor(0.5)
    optimizer.step()
    assert model.scale.full_tensor() == 0.75


@needs_a_job
def test_an_attribute_that_is_set_during_a_step_stays(monkeypatch):
    _, optimizer = _model_and_optimizer()
    optimizer.should_stop = False
    whole = _ADAM._single_tensor_adam

    def step(*args, **kwargs):
        optimizer.should_stop = True  # as a handler of a signal does
        whole(*args, **kwargs)

    monkeypatch.setattr(_ADAM, "_single_tensor_adam", step)
    assert _dispatches(optimizer) == 0
    assert optimizer.should_stop


@needs_a_job
def test_a_learning_rate_that_is_a_dtensor_is_left_to_dtensor():
    model, optimizer = _model_and_optimizer()
    mesh = model.head.weight.device_mesh
    optimizer.param_groups[0]["lr"] = DTensor.from_local(torch.tensor(0.1), mesh, [Replicate()])
    assert not take(optimizer)


@needs_a_job
def test_hooks_of_a_trace_look_at_no_parameter():
    _, optimizer = _model_and_optimizer()
    handle = register_optimizer_step_post_hook(Steps())
    assert _dispatches(optimizer) == 0
    handle.remove()


@needs_a_job
def test_parameters_that_come_twice_are_left_to_dtensor():
    model = fully_shard(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW([model.weight, model.weight])
    assert _dispatches(optimizer) > 0


@needs_a_job
@pytest.mark.parametrize("has_name", [False, True])
def test_a_closure_computes_the_gradients_of_its_step(has_name):
    model, optimizer = _model_and_optimizer()
    before = copy.deepcopy(dict(model.state_dict()))
    gradients = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = mean_square(model, 2 * batch_of(2, 8))
        loss.backward()
        gradients.append(model.head.weight.grad.to_local().clone())
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure=closure) if has_name else optimizer.step(closure)
    assert loss.requires_grad
    assert len(gradients) == 1
    moment = optimizer.state[model.head.weight]["exp_avg"].to_local()
    torch.testing.assert_close(moment, 0.1 * gradients[0])
    assert not torch.equal(before["head.weight"].to_local(), model.head.weight.to_local())
