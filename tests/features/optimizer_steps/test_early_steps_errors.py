"""Early steps and backwards that raise: what was stepped is told, and what cannot be is refused."""

import threading

import pytest
import torch
import torch.distributed as dist
from support.early_steps import ONE_KIB, OPTIMIZERS, assert_same_bits, plain_and_early
from support.job import needs_a_job
from support.models import (
    Stack,
    assert_same_parameters,
    batch_of,
    call_in_backward,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
    shard,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import (
    Zero3Error,
    clip_grad_norm_,
    fully_shard,
    gradient_norms,
    step_in_backward,
)


def _step_early_while_held(how, transport):
    model = fully_shard(Stack(width=16), transport=transport)
    step_in_backward(model, torch.optim.AdamW(model.parameters(), fused=True), bucket_mb=ONE_KIB)
    model.set_reshard_after_backward(False)
    run = compiled(model, how)
    mean_square(run, mine(batch_of(8, 16))).backward()
    with pytest.raises(Zero3Error, match="has changed since it was gathered"):
        run(mine(batch_of(8, 16)))


@each_way
@either_transport
def test_an_early_step_of_weights_that_are_held_is_noticed(run_ranks, how, transport):
    run_ranks(2, _step_early_while_held, how, transport)


def _raise():
    raise RuntimeError("a layer")


def _interrupted():
    models, optimizers = plain_and_early("sgd", depth=4)
    model = models[1]
    before = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    x = mine(batch_of(8, 16))
    for block in model.blocks[:2]:
        x = block(x)
    x = call_in_backward(x, _raise)
    for block in model.blocks[2:]:
        x = block(x)
    with (
        pytest.warns(
            UserWarning,
            match=r"had begun to step '.*blocks.[23].*' and \d+ others .* and not the rest",
        ),
        pytest.raises(RuntimeError, match="a layer"),
    ):
        x.square().mean().backward()
    after = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert all(name.startswith(("blocks.2", "blocks.3")) for name in changed)
    optimizers[1].zero_grad()
    mean_square(model, mine(batch_of(8, 16))).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_backward_that_raises_says_what_was_stepped(run_ranks):
    run_ranks(2, _interrupted)


def _two_models_in_one_backward():
    """All gradients of the first model, and its steps, come before those of the second."""
    (first, optimizers), (second, _) = plain_and_early("sgd"), plain_and_early("sgd", depth=4)
    x = mine(batch_of(8, 16))
    for model in first:
        model.set_is_last_backward(False)
        mean_square(model, x).backward()
        model.set_is_last_backward(True)
    for after, before in zip(first, second, strict=True):
        after.blocks[1](before(x)).square().mean().backward()
    assert all(p.grad is None for p in first[1].parameters())
    optimizers[0].step()
    assert_same_bits(first)

    block = second[1].blocks[3]
    with (
        pytest.warns(UserWarning, match=r"had begun to step '.*blocks.3[^']*' and [1-5] others"),
        pytest.raises(RuntimeError, match="a layer"),
    ):
        block(call_in_backward(x.clone().requires_grad_(), _raise)).square().mean().backward()


def test_a_backward_of_two_models_steps_both_and_forgets_them(run_ranks):
    run_ranks(2, _two_models_in_one_backward)


@needs_a_job
def test_backwards_that_raise_on_two_threads_name_what_each_has_stepped():
    models = [fully_shard(Stack(width=16)) for _ in range(2)]
    for model in models:
        step_in_backward(model, OPTIMIZERS["sgd"](model), bucket_mb=ONE_KIB)

    def backward(model, in_its_middle):
        x = call_in_backward(batch_of(4, 16).requires_grad_(), in_its_middle)
        mean_square(model, x).backward()

    def raise_on_another_thread():
        with pytest.raises(RuntimeError, match="a layer"):
            backward(models[1], _raise)

    def run_the_other():
        thread = threading.Thread(target=raise_on_another_thread)
        thread.start()
        thread.join()
        _raise()

    with pytest.warns(UserWarning, match="to step") as warned, pytest.raises(RuntimeError):
        backward(models[0], run_the_other)
    told = [str(each.message) for each in warned]
    assert ["to step 'Stack:2." in each for each in told] == [True, False], told
    assert "to step 'blocks.0." in told[1]


class _Early(nn.Module):
    """A weight whose last use comes first in backward. Its first is in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        x = checkpoint(self.layers[0], x, use_reentrant=True)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x


def _recomputed_before_its_step():
    torch.manual_seed(0)
    model, reference = shard(_Early())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    step_in_backward(model, optimizers[0], bucket_mb=ONE_KIB / 4)
    batch = batch_of(4, 16).requires_grad_()
    mean_square(model, mine(batch)).backward()
    mean_square(reference, batch).backward()
    optimizers[1].step()
    assert_same_parameters(model, reference)


def _gathered_after_its_step():
    model = fully_shard(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
    step_in_backward(model, torch.optim.SGD(model.parameters(), 0.1), bucket_mb=ONE_KIB / 4)
    x = call_in_backward(mine(batch_of(4, 16)).requires_grad_(), lambda: model.unshard())
    with pytest.raises(Zero3Error, match="stepped in this backward, which needs it again"):
        mean_square(model, x).backward()


def test_a_backward_does_not_compute_with_what_it_has_stepped(run_ranks):
    run_ranks(2, _recomputed_before_its_step)
    run_ranks(2, _gathered_after_its_step)


def _removed():
    models, optimizers = plain_and_early("sgd")
    with pytest.raises(Zero3Error, match="stepped in backward already: call remove"):
        step_in_backward(models[1], optimizers[1])
    again = torch.optim.SGD(models[0].parameters(), 0.1)
    early = step_in_backward(models[0], again)
    mean_square(models[0], mine(batch_of(4, 16))).backward()
    assert models[0].head.weight.grad is None
    early.remove()
    mean_square(models[0], mine(batch_of(4, 16))).backward()
    assert models[0].head.weight.grad is not None
    clip_grad_norm_(models[0].parameters(), 1.0)
    models[1].head.weight = nn.Parameter(models[1].head.weight.detach().clone())
    with pytest.raises(Zero3Error, match=r"does not have '.*head.weight' as it is registered now"):
        mean_square(models[1], mine(batch_of(4, 16))).backward()


def test_early_steps_end_when_they_are_removed(run_ranks):
    run_ranks(2, _removed)


class _Lars(torch.optim.SGD):
    pass


def _refusals():
    model = Stack()
    fully_shard(model.blocks[0])
    fully_shard(model)
    other = nn.Linear(2, 2)
    with pytest.raises(Zero3Error, match="no sharded parameter of the model"):
        step_in_backward(model, torch.optim.SGD(other.parameters()))
    with pytest.raises(TypeError, match="takes an optimizer, got list"):
        step_in_backward(model, [])
    with pytest.raises(ValueError, match=r"LBFGS may need several .* pass is_separate=True"):
        step_in_backward(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="_Lars may need several"):
        step_in_backward(model, _Lars(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters())
    for bucket_mb in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"positive number of MiB .* got {bucket_mb}"):
            step_in_backward(model, optimizer, bucket_mb=bucket_mb)
    early = step_in_backward(model, optimizer)
    mean_square(model, mine(batch_of(4, 8))).backward()
    with pytest.raises(Zero3Error, match=r"clip_grad_norm_: backwards step 'blocks\.0\.norm"):
        clip_grad_norm_(model.parameters(), 1.0)
    assert gradient_norms(model) == {}
    with pytest.raises(Zero3Error, match=r"set_all_reduce_hook: backwards step 'blocks\.0\.norm"):
        model.blocks[0].set_all_reduce_hook(lambda gradient: None)
    mean_square(model, mine(batch_of(4, 8))).backward()
    early.remove()
    model.blocks[0].set_all_reduce_hook(lambda gradient: None)
    with pytest.raises(Zero3Error, match=r"set_all_reduce_hook on the group of 'blocks.0"):
        step_in_backward(model, optimizer)
    return dist.get_rank()


def test_what_needs_all_gradients_is_refused(run_ranks):
    assert run_ranks(2, _refusals) == [0, 1]
