"""Users' hooks around a sharded block's forward run in compiled code as in eager code."""

import pytest
import torch
from support.models import Block, batch_of
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules import module as nn_module

from deepcompile_zero3 import fully_shard

pytestmark = pytest.mark.usefixtures("one_rank")


def _halve_input(module, args):
    return (args[0] / 2,)


def _halve_input_and_keywords(module, args, kwargs):
    return (args[0] / 2,), kwargs


def _halve_output(module, args, output):
    return output / 2


def _halve_output_of_keywords(module, args, kwargs, output):
    return output / 2


HOOKS = {
    "pre": lambda module: module.register_forward_pre_hook(_halve_input),
    "pre, first": lambda module: module.register_forward_pre_hook(_halve_input, prepend=True),
    "pre, keywords": lambda module: module.register_forward_pre_hook(
        _halve_input_and_keywords, with_kwargs=True
    ),
    "post": lambda module: module.register_forward_hook(_halve_output),
    "post, always": lambda module: module.register_forward_hook(_halve_output, always_call=True),
    "post, keywords": lambda module: module.register_forward_hook(
        _halve_output_of_keywords, with_kwargs=True
    ),
    "global": lambda _: nn_module.register_module_forward_hook(
        lambda module, args, output: output / 2 if isinstance(module, Block) else None
    ),
}


def _results(run, model):
    batch = batch_of(3, 8).requires_grad_()
    output = run(batch)
    output.sum().backward()
    grads = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    return output.detach(), batch.grad, grads


@pytest.mark.thin
@pytest.mark.parametrize("when", ["before fully_shard", "after it", "after the first step"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_changes_compiled_code_as_it_changes_eager_code(kind, when):
    if kind == "pre, first" and when != "before fully_shard" and torch.__version__ < "2.13":
        pytest.skip("Dynamo of torch 2.11 takes another hook for one that was moved to the front")
    model = nn.Sequential(Block(8), Block(8))
    handles = [HOOKS[kind](model[0])] if when == "before fully_shard" else []
    try:
        for module in (*model, model):
            fully_shard(module)
        if when == "after it":
            handles.append(HOOKS[kind](model[0]))
        run = torch.compile(model, backend="zero3", options={"inductor": False}, fullgraph=True)
        without = _results(run, model) if not handles else None
        if not handles:
            handles.append(HOOKS[kind](model[0]))
        results = _results(run, model)
        torch.testing.assert_close(results, _results(model, model))
        assert without is None or not torch.equal(results[0], without[0])
    finally:
        for handle in handles:
            handle.remove()


class _CallsItselfOtherwise(Block):
    def __call__(self, x):
        return super().__call__(x / 2)


def test_a_block_keeps_a_call_of_its_own():
    model = fully_shard(_CallsItselfOtherwise(8))
    run = torch.compile(model, backend="zero3", options={"inductor": False}, fullgraph=True)
    torch.testing.assert_close(_results(run, model), _results(model, model))


_registry: list[str] = []


class _Base(nn.Linear):
    def __init_subclass__(cls, *, registry):
        registry.append(cls.__name__)


class Registered(_Base, registry=_registry):
    """A module of a class that a user's base class registers."""


def test_a_base_class_does_not_see_the_class_of_a_sharded_module():
    model = fully_shard(nn.Sequential(Registered(3, 2)))
    assert type(model[0]).__name__ == "Zero3Registered"
    assert _registry == ["Registered"]


def test_hooks_of_this_library_are_no_graphs_of_their_own():
    torch._dynamo.reset()
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model = nn.Sequential(*(Block(8) for _ in range(2)))
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for block in model:
        block.compile(backend="zero3", options={"inductor": False}, fullgraph=True)
    counters.clear()
    _results(model, model)
    assert counters["stats"]["unique_graphs"] == 1
