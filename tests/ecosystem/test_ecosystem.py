"""Tools used with a model: every optimizer, schedulers, averages, scalers, profilers."""

import re

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.models import (
    Stack,
    assert_same_parameters,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    shard,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from deepcompile_zero3.torch_release import RELEASE

# DTensor has no rules for Adafactor, Rprop (before torch 2.15) and fused SGD, and SparseAdam wants
# sparse gradients.
OPTIMIZERS = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {"foreach": False}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
]


def _three_steps(cls, kwargs):
    model, reference = shard(Stack())
    optimizers = [cls(m.parameters(), lr=0.01, **kwargs) for m in (model, reference)]
    schedulers = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in optimizers]
    for seed in range(3):
        mean_square(model, mine(batch_of(4, 8, seed=seed))).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    # Some optimizers divide by nearly zero in the first steps.
    assert_same_parameters(model, reference, tolerance=1e-3)


@pytest.mark.parametrize(
    ("cls", "kwargs"), OPTIMIZERS, ids=[f"{c.__name__}-{'-'.join(k)}" for c, k in OPTIMIZERS]
)
def test_optimizers_step_shards_as_they_step_whole_parameters(run_ranks, cls, kwargs):
    run_ranks(2, _three_steps, cls, kwargs)


def _on_local_tensors():
    for cls, kwargs in ((torch.optim.Rprop, {}), (torch.optim.SGD, {"fused": True})):
        model, reference = shard(Stack())
        optimizers = [cls(m.parameters(), lr=0.01, **kwargs) for m in (model, reference)]
        for seed in range(3):
            mean_square(model, mine(batch_of(4, 8, seed=seed))).backward()
            mean_square(reference, batch_of(4, 8, seed=seed)).backward()
            has_rules = cls is torch.optim.Rprop and RELEASE >= (2, 15)
            if seed == 0 and not has_rules:
                other = cls(model.parameters(), lr=0.01, **kwargs)
                other.register_step_pre_hook(lambda *_: None)  # so it steps DTensors
                with pytest.raises(Exception, match=r"placement changes|sharding strategy"):
                    other.step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(model, reference)


def test_elementwise_optimizers_without_rules_step_local_tensors(run_ranks):
    run_ranks(2, _on_local_tensors)


def _lbfgs():
    model, reference = shard(Stack())
    batch = batch_of(4, 8)
    optimizers = [torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (model, reference)]

    def closure_of(run, optimizer, rows):
        def closure():
            optimizer.zero_grad()
            loss = mean_square(run, rows)
            loss.backward()
            if run is model:  # ranks decide alike
                dist.all_reduce(loss := loss.detach() / dist.get_world_size())
            return loss

        return closure

    for _ in range(2):
        optimizers[0].step(closure_of(model, optimizers[0], mine(batch)))
        optimizers[1].step(closure_of(reference, optimizers[1], batch))
    assert_same_parameters(model, reference, tolerance=1e-4)


def test_lbfgs_steps_shards_if_ranks_return_the_same_loss(run_ranks):
    run_ranks(2, _lbfgs)


def _compiled_optimizer(how, backend):
    model, reference = shard(Stack())
    run = compiled(model, how)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    step = torch.compile(optimizers[0].step, backend=backend)
    for seed in range(3):
        mean_square(run, mine(batch_of(4, 8, seed=seed))).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        step()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_same_parameters(model, reference, tolerance=1e-3)
    assert all(isinstance(each, DTensor) for each in optimizers[0].state)


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("eager", "eager"),
        pytest.param("zero3", "inductor", marks=[pytest.mark.long, pytest.mark.inductor]),
    ],
)
def test_the_step_of_an_optimizer_can_be_compiled(run_ranks, how, backend):
    run_ranks(2, _compiled_optimizer, how, backend)


NORMS = [1.0, 2.0, 3.0, float("inf"), 0.0]


def _clipped(norm_type, foreach):
    model, reference = shard(Stack())
    mean_square(model, mine(batch_of(4, 8))).backward()
    mean_square(reference, batch_of(4, 8)).backward()
    norms = [
        nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type, foreach=foreach)
        for m in (model, reference)
    ]
    assert norms[0].full_tensor().item() == pytest.approx(norms[1].item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.thin
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_clipped_by_the_norm_of_all_of_them(run_ranks, norm_type, foreach):
    run_ranks(2, _clipped, norm_type, foreach)


class _WithScalar(Stack):
    """Its first parameter is a scalar, which all ranks have whole."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        return super().forward(x) * self.scale


def _scaled(build):
    model, reference = shard(build())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in range(2)]
    for seed in range(4):
        batch = batch_of(4, 8, seed=seed)
        losses = mean_square(model, mine(batch)), mean_square(reference, batch)
        for scaler, loss in zip(scalers, losses, strict=True):
            scaler.scale(loss).backward()
        if seed == 1:  # only in rows of the last rank
            last = model.head.weight.grad
            if dist.get_rank() == dist.get_world_size() - 1:
                last.to_local()[-1, -1] = float("inf")
            reference.head.weight.grad[-1, -1] = float("inf")
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("build", [Stack, _WithScalar])
def test_a_step_whose_gradients_overflow_on_one_rank_is_skipped_on_all(run_ranks, build):
    run_ranks(2, _scaled, build)


def _averaged():
    model, reference = shard(Stack())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    averages = [[p.detach().clone() for p in m.parameters()] for m in (model, reference)]
    update = get_ema_multi_avg_fn(0.9)
    for seed in range(3):
        mean_square(model, mine(batch_of(4, 8, seed=seed))).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        for m, optimizer, average in zip((model, reference), optimizers, averages, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            update(average, [p.detach() for p in m.parameters()], seed)
    for ours, theirs in zip(*averages, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


def test_an_average_of_the_parameters_is_kept_in_shards(run_ranks):
    run_ranks(2, _averaged)


@needs_a_job
@each_way
def test_profiles_name_gathers_and_reductions(how):
    model, _ = shard(Stack())
    run = compiled(model, how)
    mean_square(run, batch_of(4, 8)).backward()
    with torch.profiler.profile() as profile:
        mean_square(run, batch_of(4, 8)).backward()
    names = {event.key for event in profile.key_averages()}
    for step, first in (
        ("all_gather start", "blocks.0."),
        ("all_gather wait", "blocks.0."),
        ("reduce_scatter send", "head."),
        ("reduce_scatter start", "head."),
        ("reduce_scatter wait", "head."),
    ):
        expected = rf"zero3::{step} \[Float, \d+ bytes\] {re.escape(first)}"
        assert any(re.match(expected, name) for name in names), (step, names)
