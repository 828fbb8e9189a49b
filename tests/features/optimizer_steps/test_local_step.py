"""``step_locally``: steps on local tensors change the same bits as steps on DTensors."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.mesh_models import replicas
from support.models import Stack, batch_of, mean_square, mine
from support.optimizer_models import OPTIMIZERS, assert_same, step_by_dispatch, two
from support.owned_models import muon_and_adam, owned
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import Zero3Error, fully_shard, step_locally


def _steps(name):
    models, optimizers, plain = two(OPTIMIZERS[name], replicas() if name == "sgd" else None)
    step_locally(optimizers[1])
    for seed in range(3):
        for model, optimizer, parameter in zip(models, optimizers, plain, strict=True):
            mean_square(model, mine(batch_of(12, 8, seed=seed))).backward()
            parameter.grad = torch.full([2], 0.1 + seed)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, optimizers, plain)
        if seed == 1:
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return True


# Kernels of one class, replicas, and states of several kinds. The others are stepped likewise.
@pytest.mark.first(name=("adamw", "adamw, foreach", "adamw, fused", "sgd", "ASGD"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_local_step_changes_the_same_bits(run_ranks, name):
    world_size = 4 if name == "sgd" else 3
    assert all(run_ranks(world_size, _steps, name))


def _of_owners():
    torch.manual_seed(0)
    whole = Stack()
    models, optimizers = [], []
    for _ in range(2):
        model, _, owners = owned(copy.deepcopy(whole))
        models.append(model)
        optimizers.append(muon_and_adam(model, owners))
    for by_dispatch, locally in zip(*optimizers, strict=True):
        step_by_dispatch(by_dispatch)
        step_locally(locally)
    for seed in range(2):
        for model, both in zip(models, optimizers, strict=True):
            mean_square(model, mine(batch_of(8, 8, seed=seed))).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in models[0].named_parameters():
        other = models[1].get_parameter(name).full_tensor()
        assert torch.equal(parameter.full_tensor(), other), name
    first, second = (
        get_optimizer_state_dict(m, o) for m, o in zip(models, optimizers, strict=True)
    )
    assert first["state"].keys() == second["state"].keys()
    for name, state in first["state"].items():
        for key, value in state.items():
            other = second["state"][name][key]
            if isinstance(value, DTensor):
                value, other = value.full_tensor(), other.full_tensor()
            assert torch.equal(value, other), (name, key)


def test_any_optimizer_of_owned_parameters_may_step_locally(run_ranks):
    run_ranks(2, _of_owners)


@needs_a_job
@pytest.mark.parametrize("first", ["scheduler", "step_locally"])
def test_schedulers_and_closures_work_with_a_local_step(first):
    (model, _), _, _ = two(OPTIMIZERS["sgd"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if first == "step_locally":
        step_locally(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if first == "scheduler":
        step_locally(optimizer)
    before = model.scale.to_local().item()

    def closure():
        optimizer.zero_grad()
        assert isinstance(optimizer.param_groups[0]["params"][0], DTensor)
        loss = mean_square(model, batch_of(2, 8))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() > 0
    assert model.scale.to_local().item() == before - model.scale.grad.to_local().item()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@needs_a_job
def test_a_step_that_raises_leaves_dtensors():
    (model, _), _, _ = two(OPTIMIZERS["sgd"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step_locally(optimizer)
    seen = []

    def fail(*_):
        seen.append(optimizer.param_groups[0]["params"][0])
        raise RuntimeError("a hook")

    mean_square(model, batch_of(2, 8)).backward()
    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a hook"):
        optimizer.step()
    hook.remove()
    assert type(seen[0]) is nn.Parameter
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    assert optimizer.param_groups[0]["params"][0].grad is not None
    optimizer.zero_grad()
    assert model.scale.grad is None


@needs_a_job
def test_a_shard_that_is_replaced_is_stepped():
    (model, _), _, _ = two(OPTIMIZERS["sgd"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step_locally(optimizer)
    for _ in range(2):
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        mean_square(model, batch_of(2, 8)).backward()
        gradient = model.scale.grad.to_local().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.scale.to_local(), 1 - gradient)


class _Counted(torch.optim.SGD):
    """Counts its steps, in a state of no parameter."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


@needs_a_job
def test_a_state_of_no_parameter_is_kept():
    model = fully_shard(Stack())
    optimizer = _Counted(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="_Counted may need more"):
        step_locally(optimizer)
    step_locally(optimizer, is_elementwise=True)
    for _ in range(3):
        optimizer.step()
    assert optimizer.state["steps"] == 3
    alive = weakref.ref(optimizer)
    gc.disable()
    del optimizer
    gc.enable()
    assert alive() is None


class _Centered(torch.optim.Optimizer):
    """Subtracts the mean of a gradient from it."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= parameter.grad - parameter.grad.mean()


@needs_a_job
def test_an_optimizer_that_may_need_more_than_its_elements_is_refused():
    model = fully_shard(Stack())
    with pytest.raises(ValueError, match=r"_Centered may need more .* pass is_elementwise=True"):
        step_locally(_Centered(model.parameters()))
    step_locally(_Centered(model.parameters()), is_elementwise=True)
    with pytest.raises(ValueError, match="Adafactor may need more"):
        step_locally(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(TypeError, match="takes an optimizer, got method"):
        step_locally(torch.optim.SGD(model.parameters()).step)
    optimizer = torch.optim.SGD(model.parameters())
    step_locally(optimizer)
    with pytest.raises(Zero3Error, match="called twice on the same SGD"):
        step_locally(optimizer)


@needs_a_job
def test_a_grad_dtype_may_change_between_steps():
    model = fully_shard(Stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_locally(optimizer)
    weight = model.head.weight
    for dtype in (torch.bfloat16, torch.float32, None):
        for parameter in model.parameters():
            parameter.grad_dtype = dtype
        mean_square(model, batch_of(4, 8)).backward()
        assert weight.grad.dtype == (dtype or torch.float32)
        expected = weight.to_local() - 0.1 * weight.grad.to_local().float()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(weight.to_local(), expected)


@needs_a_job
def test_a_parameter_that_leaves_the_optimizer_is_freed():
    model = fully_shard(Stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_locally(optimizer)
    mean_square(model, batch_of(4, 8)).backward()
    optimizer.step()
    weight = weakref.ref(model.head.weight)
    optimizer.param_groups.clear()
    del model
    gc.collect()
    assert weight() is None


def _lower_gradients():
    """Gradients of another dtype than that of their parameters."""
    torch.manual_seed(0)
    whole = Stack()
    models = [copy.deepcopy(whole) for _ in range(2)]
    for model in models:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.bfloat16
        fully_shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, foreach=False) for m in models]
    step_by_dispatch(optimizers[0])
    step_locally(optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        mean_square(model, mine(batch_of(4, 8))).backward()
        assert model.head.weight.grad.dtype == torch.bfloat16
        optimizer.step()
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())
    return dist.get_rank()


def test_gradients_may_have_another_dtype(run_ranks):
    assert run_ranks(2, _lower_gradients) == [0, 1]


@needs_a_job
def test_a_local_step_is_left_to_python():
    (model, other), _, _ = two(OPTIMIZERS["adamw"])
    for each, is_compiled in ((model, True), (other, False)):
        optimizer = torch.optim.AdamW(each.parameters(), 0.1)
        step_locally(optimizer)
        mean_square(each, batch_of(2, 8)).backward()
        step = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
        step()
    for mine_, others in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine_.to_local(), others.to_local())


@needs_a_job
def test_a_step_that_was_put_back_has_no_layers():
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = optimizer.step
    step_locally(optimizer)
    optimizer.step = step
    step_locally(optimizer)  # the first call's layer is gone
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(Zero3Error, match="called twice"):
        step_locally(optimizer)
