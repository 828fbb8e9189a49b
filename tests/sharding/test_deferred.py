"""Gradients that are reduced later: defer_reduction and deposit_grad."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.accumulation import Experts, ops
from support.job import needs_a_job
from support.models import batch_of, compiled, compiled_each_way, each_way
from torch import nn

from deepcompile_zero3 import (
    Zero3Error,
    defer_reduction,
    deposit_grad,
    fully_shard,
    record_collectives,
)
from deepcompile_zero3.sharding.module_parameters import parameters_of


@needs_a_job
@each_way
def test_deferred_gradients_come_when_the_block_ends(how):
    model = fully_shard(Experts())
    run = compiled(model, how)
    fired = []
    model.late.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.full_tensor()))
    late = parameters_of(model)["late"]
    with record_collectives() as log, defer_reduction(model):
        run(torch.ones(2, 8), use_both=True).sum().backward()
        run(torch.ones(2, 8), use_both=False).sum().backward()
        deposit_grad(model.late, torch.ones(8, 8))
        ops.reduce_grad(2 * torch.ones(8, 8, dtype=torch.float64), late.placeholder)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(c.op == "reduce_scatter" for c in log)
    reduced = [fqn for c in log if c.op == "reduce_scatter" for fqn in c.params]
    assert sorted(reduced) == sorted(name for name, _ in model.named_parameters())
    assert torch.equal(model.late.grad.full_tensor(), torch.full((8, 8), 3.0))
    assert len(fired) == 1


@needs_a_job
def test_a_deferred_block_that_raises_leaves_nothing_behind():
    model = fully_shard(Experts())

    def fail():
        with defer_reduction(model):
            deposit_grad(model.late, torch.ones(8, 8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with defer_reduction(model):
        deposit_grad(model.late, torch.ones(8, 8))
    assert torch.equal(model.late.grad.full_tensor(), torch.ones(8, 8))
    assert model.first.weight.grad is None


@needs_a_job
def test_impossible_deposits_are_refused():
    model = fully_shard(Experts())
    model.first.weight.requires_grad_(False)
    with pytest.raises(Zero3Error, match="with defer_reduction"):
        deposit_grad(model.late, torch.ones(8, 8))
    with pytest.raises(RuntimeError, match=r"'late'.* inside of defer_reduction"):
        ops.reduce_grad(torch.ones(8, 8), parameters_of(model)["late"].placeholder)
    with pytest.raises(Zero3Error, match="no parameter of the Linear is sharded"):
        defer_reduction(nn.Linear(2, 2)).__enter__()
    with defer_reduction(model):
        with pytest.raises(RuntimeError, match=r"'late' has shape \[4, 8\]"):
            deposit_grad(model.late, torch.ones(4, 8))
        with pytest.raises(RuntimeError, match=r"'late' is Long, which cannot be summed"):
            deposit_grad(model.late, torch.ones(8, 8, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="'late' is on meta"):
            deposit_grad(model.late, torch.ones(8, 8, device="meta"))
        with pytest.raises(Zero3Error, match=r"'first\.weight' needs no gradient"):
            deposit_grad(model.first.weight, torch.ones(8, 8))
        with pytest.raises(Zero3Error, match="is a DTensor"):
            deposit_grad(model.late, model.late.detach())
        with pytest.raises(Zero3Error, match="deferred already"):
            defer_reduction(model).__enter__()
        with pytest.raises(Zero3Error, match=r"model\.parameters\(\)"):
            deposit_grad(nn.Parameter(torch.ones(8, 8)), torch.ones(8, 8))


@needs_a_job
def test_a_deferred_backward_that_raises_is_not_forgotten():
    model = fully_shard(Experts())

    def raise_in_backward():
        deposit_grad(model.late, torch.ones(8, 8))
        x = torch.ones(2, 8, requires_grad=True) * 1
        x.register_hook(lambda grad: 1 / 0)  # after the gradients of the second layer
        model(x, use_both=True).sum().backward()

    def block():
        with defer_reduction(model), contextlib.suppress(ZeroDivisionError):
            raise_in_backward()

    told = r"a backward in the block raised, and the gradients of the model of '.*' .* are lost:"
    with pytest.raises(Zero3Error, match=told):
        block()
    assert model.late.grad is None


@needs_a_job
def test_gradients_may_be_given_up_within_a_deferred_block():
    model = fully_shard(Experts())
    with defer_reduction(model):
        deposit_grad(model.late, torch.ones(8, 8))
        model.reset_iter_state()
        deposit_grad(model.late, torch.full((8, 8), 2.0))
    assert torch.equal(model.late.grad.full_tensor(), torch.full((8, 8), 2.0))


@needs_a_job
def test_a_deposit_counts_whatever_the_backward_around_it_is_asked_for():
    model = fully_shard(Experts())
    x = torch.ones(2, 8, requires_grad=True)
    with defer_reduction(model):
        output = model(x)
        late = model._parameters["late"]
        output.register_hook(lambda grad: deposit_grad(late, torch.ones(8, 8)))
        output.sum().backward(inputs=[x])
    assert torch.equal(model.late.grad.full_tensor(), torch.ones(8, 8))
    assert model.first.weight.grad is None


def _deposit_on_one_rank_each():
    model = fully_shard(Experts())
    rank = dist.get_rank()
    weights = [model.first.weight, model.second.weight]
    weights[rank].grad_dtype = None
    weights[1 - rank].grad_dtype = None
    with defer_reduction(model):
        deposit_grad(weights[rank], torch.full((8, 8), rank + 1.0, dtype=torch.bfloat16))
    for owner, weight in enumerate(weights):
        expected = torch.full((8, 8), (owner + 1) / 2).bfloat16()
        assert torch.equal(weight.grad.full_tensor(), expected)
    assert model.late.grad is None


@pytest.mark.gloo
def test_a_rank_without_a_deposit_counts_as_zero(run_ranks):
    """Messages tell their dtype: over collectives, ranks have to know it (grad_dtype)."""
    run_ranks(2, _deposit_on_one_rank_each)


def _keep_a_sum_of_one_rank():
    model = fully_shard(Experts())
    model.set_requires_gradient_sync(False)
    with defer_reduction(model):
        if dist.get_rank() == 0:
            deposit_grad(model.late, torch.ones(8, 8))
    model.set_requires_gradient_sync(True)
    model(batch_of(2, 8)).sum().backward()
    assert torch.equal(model.late.grad.full_tensor(), torch.full((8, 8), 0.5))


def test_a_sum_that_is_kept_on_one_rank_is_reduced_on_all(run_ranks):
    run_ranks(2, _keep_a_sum_of_one_rank)


@needs_a_job
def test_gradients_may_be_deposited_in_inference_mode():
    model = fully_shard(Experts())
    x = batch_of(2, 8)
    for _ in range(2):
        with torch.inference_mode(), defer_reduction(model):
            deposit_grad(model.late, torch.ones(8, 8))
        with defer_reduction(model):
            with torch.inference_mode():
                deposit_grad(model.second.bias, torch.ones(8))
            model(x, use_both=True).sum().backward()
    assert not model.late.grad.is_inference()
    assert torch.equal(model.late.grad.full_tensor(), torch.full((8, 8), 2.0))
    assert torch.equal(model.second.bias.grad.full_tensor(), torch.full((8,), 6.0))


@needs_a_job
def test_a_parameter_that_was_replaced_after_its_forward_gets_no_deferred_gradient():
    model = fully_shard(Experts())
    loss = model(batch_of(2, 8)).sum()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(Zero3Error, match="was replaced"), defer_reduction(model):
        loss.backward()
    assert model.first.weight.grad is None


class _Constant(torch.autograd.Function):
    """A function whose gradient does not depend on the loss's gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx, _):
        return None, torch.sign(ctx.saved_tensors[0])


class _Signs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return _Constant.apply(x, self.weight)


@needs_a_job
@pytest.mark.parametrize("deferred", [False, True])
def test_a_gradient_that_a_backend_computes_in_forward_is_refused(deferred):
    model = fully_shard(_Signs())
    run = torch.compile(model, backend="aot_eager")
    block = defer_reduction(model) if deferred else contextlib.nullcontext()
    with pytest.raises(RuntimeError, match="'weight' was computed in forward"), block:
        run(torch.ones(4))


@needs_a_job
@compiled_each_way
def test_a_gradient_that_depends_on_no_tangent_is_reduced(how):
    model = fully_shard(_Signs())
    run = compiled(model, how)
    x = torch.tensor([1.0, -2.0, 3.0, -4.0])
    run(x).backward()
    assert torch.equal(model.weight.grad.full_tensor(), x.sign())
