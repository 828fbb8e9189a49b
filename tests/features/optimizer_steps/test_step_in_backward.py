"""``step_in_backward``: parameters are stepped while the backward computes, with the same bits."""

import copy

import pytest
import torch
from support.early_steps import ONE_KIB, OPTIMIZERS, assert_same_bits, plain_and_early
from support.job import needs_a_job
from support.mesh_models import replicas
from support.models import (
    Stack,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import (
    Zero3Error,
    detect_nonfinite,
    fully_shard,
    step_in_backward,
    step_locally,
)


def _watch(model):
    """Returns a list that gets the numbers of parameters with a gradient, as gradients come."""
    alive = []
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    return alive


def _same_bits(how, transport, optimizer):
    models, optimizers = plain_and_early(optimizer, transport=transport)
    runs = [compiled(model, how) for model in models]
    alive = _watch(models[1])
    for seed in range(3):
        for run in runs:
            mean_square(run, mine(batch_of(8, 16, seed=seed))).backward()
        if optimizer != "muon":
            assert all(p.grad is None for p in models[1].parameters())
        step(optimizers)
        for model in models:
            model.zero_grad()
        assert_same_bits(models)
    assert optimizers[0].state_dict()["state"].keys() == optimizers[1].state_dict()["state"].keys()
    return max(alive)


@pytest.mark.thin
@each_way
@either_transport
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_early_steps_change_the_same_bits(run_ranks, how, transport, optimizer):
    most = run_ranks(2, _same_bits, how, transport, optimizer)
    assert optimizer == "muon" or max(most) <= 6  # of 14: those of two buckets


def _hooks_see(how, transport):
    """Returns what hooks of early and of late parameters see, which are in ``late``."""
    torch.manual_seed(0)
    model = Stack(width=16)
    for block in model.blocks:
        fully_shard(block, transport=transport)
    fully_shard(model, transport=transport)
    early = [p for name, p in model.named_parameters() if "head" not in name]
    optimizer = torch.optim.SGD(early, 0.1)
    step_in_backward(model, optimizer, bucket_mb=ONE_KIB)
    seen = {True: set(), False: set()}

    def look(parameter):
        before = parameter._version
        with torch.no_grad():
            parameter.mul_(1.5)
        x = torch.ones(3, requires_grad=True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad((x * x).sum(), x)
        is_early = any(parameter is each for each in early)
        seen[is_early].add(
            (
                parameter._version - before,
                torch.is_grad_enabled(),
                (parameter.detach() * 2).to_local().is_leaf,
                gradient.sum().item(),
            )
        )

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    run = compiled(model, how)
    for seed in range(2):
        mean_square(run, mine(batch_of(8, 16, seed=seed))).backward()
    assert len(seen[True]) == 1
    assert seen[True] == seen[False]


@each_way
@either_transport
def test_hooks_of_early_gradients_see_the_state_of_others(run_ranks, how, transport):
    run_ranks(2, _hooks_see, how, transport)


def _two_forwards(how, settings):
    models, optimizers = plain_and_early("adamw", **settings)
    seen: list[int] = []
    for module in (models[0], *models[0].blocks):
        module.set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
    for model in models:
        run = compiled(model, how)
        losses = [mean_square(run, mine(batch_of(8, 16, seed=seed))) for seed in range(2)]
        sum(losses).backward()
    for each in optimizers:
        each.step()
    assert sum(seen) == sum(p.to_local().numel() for p in models[0].parameters())
    assert_same_bits(models)


@each_way
@either_transport
def test_a_backward_of_two_forwards_steps_once(run_ranks, how, transport):
    run_ranks(2, _two_forwards, how, {"transport": transport})
    run_ranks(2, _two_forwards, how, {"transport": transport, "reshard_after_forward": False})


def _a_backward_in_between(settings):
    models, optimizers = plain_and_early("sgd", **settings)
    for model, optimizer in zip(models, optimizers, strict=True):
        losses = [mean_square(model, mine(batch_of(8, 16, seed=seed))) for seed in range(2)]
        model.set_is_last_backward(False)
        losses[0].backward()
        model.set_is_last_backward(True)
        (losses[1] + mean_square(model, mine(batch_of(8, 16, seed=2)))).backward()
        optimizer.step()
    assert_same_bits(models)


def test_a_forward_may_wait_for_the_next_backward(run_ranks):
    for reshards in (True, False):
        run_ranks(2, _a_backward_in_between, {"reshard_after_forward": reshards})


def _most_alive(depth):
    models, _ = plain_and_early("adamw", depth=depth)
    alive = _watch(models[1])
    mean_square(models[1], mine(batch_of(8, 16))).backward()
    return max(alive)


def test_live_gradients_do_not_grow_with_depth(run_ranks):
    shallow, deep = (max(run_ranks(2, _most_alive, depth)) for depth in (2, 8))
    assert deep <= shallow


def _micro_batches(way, mesh_of):
    models, optimizers = plain_and_early("adamw", mesh_of() if mesh_of else None)
    for _ in range(2):
        for model in models:
            for micro in range(3):
                if way == "no sync":
                    model.set_requires_gradient_sync(micro == 2)
                else:
                    model.set_is_last_backward(micro == 2)
                batch = mine(batch_of(8, 16, seed=micro))
                if micro == 2:  # some parameters have gradients of earlier micro-batches only
                    model.blocks[1](batch).square().mean().backward()
                else:
                    mean_square(model, batch).backward()
                    assert way == "no sync" or model.head.weight.grad is not None
        step(optimizers)
        assert_same_bits(models)


@pytest.mark.thin
@pytest.mark.parametrize("way", ["no sync", "is last"])
@pytest.mark.parametrize("mesh_of", [None, replicas])
def test_only_the_last_micro_batch_steps(run_ranks, way, mesh_of):
    run_ranks(4, _micro_batches, way, mesh_of)


@needs_a_job
def test_a_backward_without_sync_steps_no_earlier_gradient():
    model = fully_shard(Stack(width=16))
    step_in_backward(model, OPTIMIZERS["sgd"](model), bucket_mb=ONE_KIB)
    for is_last in (False, True):
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(not is_last)
        mean_square(model, batch_of(4, 16)).backward()
        assert all(p.grad is not None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    mean_square(model, batch_of(4, 16)).backward()
    assert all(p.grad is None for p in model.parameters())


def _beside_others():
    """A part of the parameters is stepped, by an optimizer that steps locally and a scheduler."""
    torch.manual_seed(0)
    whole = Stack(width=16)
    models, optimizers, schedulers = [], [], []
    for early in (False, True):
        model = copy.deepcopy(whole)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.blocks.parameters(), lr=1.0)
        if early:
            step_locally(optimizer)
            step_in_backward(model, optimizer, bucket_mb=ONE_KIB)
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        models.append(model)
        optimizers.append(optimizer)
    for seed in range(3):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            model.zero_grad()
            mean_square(model, mine(batch_of(8, 16, seed=seed))).backward()
            assert model.head.weight.grad is not None
            optimizer.step()
            scheduler.step()
        assert_same_bits(models)
    with detect_nonfinite(models[1]):
        mean_square(models[1], mine(batch_of(8, 16))).backward()
        assert models[1].blocks[0].up.weight.grad is None
        bad = torch.full((4, 16), float("nan"))
        before = [p.full_tensor() for p in models[1].parameters()]
        with pytest.raises(Zero3Error, match="not finite"):
            mean_square(models[1], bad).backward()
    for parameter, value in zip(models[1].parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), value)


def test_other_parameters_schedulers_and_checks_work_as_before(run_ranks):
    run_ranks(2, _beside_others)


class _Shared(nn.Module):
    """Blocks in checkpoints, one of them twice, and a weight that two layers share."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.use_reentrant))
        return self.last(x)


def _shared(use_reentrant, transport):
    torch.manual_seed(0)
    whole = _Shared(use_reentrant)
    models = [copy.deepcopy(whole) for _ in range(2)]
    for model in models:
        for block in model.blocks:
            fully_shard(block, transport=transport)
        fully_shard(model, transport=transport)
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1) for model in models]
    step_in_backward(models[1], optimizers[1], bucket_mb=ONE_KIB)
    for seed in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            mean_square(model, mine(batch_of(8, 16, seed=seed))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(models)


@pytest.mark.parametrize("use_reentrant", [False, True])
@either_transport
def test_checkpoints_and_shared_weights_are_stepped_once(run_ranks, use_reentrant, transport):
    run_ranks(2, _shared, use_reentrant, transport)


def _in_a_checkpoint(transport):
    """All gradients come in backwards inside of another one."""
    models, optimizers = plain_and_early("adamw", transport=transport)
    for seed in range(2):
        batch = mine(batch_of(8, 16, seed=seed)).requires_grad_()
        for model, optimizer in zip(models, optimizers, strict=True):
            parts = [checkpoint(model, k * batch, use_reentrant=True) for k in (1, 2)]
            sum(part.square().mean() for part in parts).backward()
            assert model is models[0] or all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(models)


@either_transport
def test_a_model_in_a_checkpoint_is_stepped(run_ranks, transport):
    run_ranks(2, _in_a_checkpoint, transport)
