"""A contract that changes between steps applies from then on; a late change is refused."""

import gc

import pytest
import torch
from support.contract import Kernel
from support.models import assert_same_gradients, batch_of, compiled, each_way, shard
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import Zero3Error, fully_shard

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.smoke
@each_way
def test_a_contract_that_changes_between_steps_holds_from_the_next_forward_on(how):
    model = fully_shard(nn.Sequential(nn.Linear(8, 8).bfloat16(), Kernel(8, 8).bfloat16()))
    run = compiled(model, how)
    for dtype in [torch.bfloat16, torch.float32, torch.float32, torch.float64, torch.bfloat16]:
        model[1].weight.grad_dtype = dtype
        for _ in range(2):
            x = batch_of(4, 8).bfloat16()
            run(x).backward(batch_of(4, 8, seed=1).bfloat16())
            grad = model[1].weight.grad.full_tensor()
            assert grad.dtype == dtype
            rounded = grad.to(torch.bfloat16).to(dtype)
            assert torch.equal(grad, rounded) == (dtype == torch.bfloat16)
            model.zero_grad()


@pytest.mark.smoke
@each_way
def test_a_contract_that_changes_before_backward_is_refused(how):
    # Eager code gathers the second layer's weight again in backward.
    model = fully_shard(nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).bfloat16()))
    run = compiled(model, how)
    x = torch.ones(2, 8).bfloat16()
    for layer in model:
        loss = run(x).sum()
        layer.weight.grad_dtype = torch.float32
        with pytest.raises(Zero3Error, match=r"was torch\.bfloat16 .* is torch\.float32"):
            loss.backward()
        assert layer.weight.grad is None
        run(x).sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        model.zero_grad()


@each_way
def test_each_forward_keeps_its_own_contract(how):
    model = fully_shard(nn.Sequential(nn.Linear(8, 8).bfloat16()))
    run = compiled(model, how)
    first = run(torch.ones(2, 8).bfloat16()).sum()
    model[0].weight.grad_dtype = torch.float32
    run(torch.ones(2, 8).bfloat16()).sum()
    with pytest.raises(RuntimeError, match=r"'0\.weight'.*was bfloat16 in the forward.* float32"):
        first.backward()


class _ReadOnceUsedTwice(nn.Linear):
    def forward(self, x):
        weight = self.weight
        return nn.functional.linear(x, weight) * nn.functional.linear(3.3 * x, weight)


@pytest.mark.more
def test_another_backends_cache_keeps_contracts_apart():
    for dtype in [torch.bfloat16, torch.float32]:
        model = _ReadOnceUsedTwice(8, 8).bfloat16()
        model.weight.grad_dtype = dtype
        fully_shard(model)
        torch.compile(model, backend="inductor")(batch_of(4, 8).bfloat16()).float().sum().backward()
        grad = model.weight.grad.full_tensor()
        is_rounded = torch.equal(grad.bfloat16().to(dtype), grad)
        assert is_rounded == (dtype == torch.bfloat16), dtype
        del model
        torch._dynamo.reset()
        gc.collect()  # otherwise the next model gets another name


def test_a_contract_survives_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8).bfloat16())
    model[0].weight.grad_dtype = torch.float32
    fully_shard(model)
    model.to_empty(device=torch.get_default_device())
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[0].bias)
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    assert model[0].bias.grad.dtype == torch.bfloat16


@each_way
def test_the_default_may_be_set_again_before_the_first_forward(how):
    model = nn.Sequential(nn.Linear(8, 8).bfloat16())
    model[0].weight.grad_dtype = torch.float32
    fully_shard(model)
    model[0].weight.grad_dtype = torch.bfloat16
    compiled(model, how)(torch.ones(2, 8).bfloat16()).sum().backward()
    assert model[0].weight.grad.dtype == torch.bfloat16


def test_a_read_before_a_forward_does_not_keep_its_contract():
    model = fully_shard(nn.Linear(8, 8).bfloat16())
    model.unshard()
    model.weight.sum()
    model._parameters["weight"].grad_dtype = torch.float32
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    assert model.weight.grad.dtype == torch.float32


def _thaw(weight):
    weight.requires_grad_(True)


def _widen(weight):
    weight.grad_dtype = torch.float32


@pytest.mark.thin
@pytest.mark.parametrize("change", [_thaw, _widen])
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_a_stock_backend_follows_a_change(backend, change):
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16())
    weight = model[1].weight
    if change is _thaw:
        weight.requires_grad_(False)
    run = torch.compile(model, backend=backend)
    x = torch.ones(2, 8).bfloat16()
    run(x).sum().backward()
    model.zero_grad()
    change(weight)

    run(x).sum().backward()

    expected = torch.float32 if change is _widen else torch.bfloat16
    assert weight.grad.dtype == expected


class _Partial(nn.Module):
    """A module with a layer that it does not use, and a graph break before the last one."""

    def __init__(self):
        super().__init__()
        self.unused, self.first, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


@each_way
def test_freezing_and_thawing_need_no_second_call(how):
    model = fully_shard(_Partial())
    run = compiled(model, how)
    for trains in (True, False, True):
        model.requires_grad_(trains)
        model.last.requires_grad_(True)
        run(batch_of(4, 8)).sum().backward()
        grads = {name for name, p in model.named_parameters() if p.grad is not None}
        trained = ("first", "last") if trains else ("last",)
        assert grads == {f"{name}.{each}" for name in trained for each in ("weight", "bias")}
        model.zero_grad()


@pytest.mark.parametrize("change", [_thaw, _widen])
def test_graphs_of_two_contracts_that_take_turns_are_compiled_once_each(change):
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16())
    weight = model[1].weight
    run = compiled(model, "interpreted", fullgraph=True)
    counters.clear()
    for is_changed in (False, True, False, True, True, False):
        weight.requires_grad_(change is not _thaw)
        weight.grad_dtype = torch.bfloat16
        if is_changed:
            change(weight)
        run(batch_of(4, 8).bfloat16()).sum().backward()
        assert (weight.grad is not None) == weight.requires_grad
        assert weight.grad is None or weight.grad.dtype == weight.grad_dtype
        model.zero_grad()
    assert counters["stats"]["unique_graphs"] == 2


def test_a_compiled_block_in_a_checkpoint_may_be_frozen_between_steps():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, reference = shard(model, model)
    for block in model:
        block.compile(backend="zero3", options={"inductor": False})
    for trains in (True, False, True):
        batch = batch_of(4, 8)
        for each in (model, reference):
            each[1].weight.requires_grad_(trains)
            x = batch
            for block in each:
                x = checkpoint(block, x, use_reentrant=False)
            x.square().sum().backward()
        assert_same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
