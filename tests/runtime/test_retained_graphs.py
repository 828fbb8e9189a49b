"""Several backwards through one forward: ``backward(retain_graph=True)``."""

import pytest
import torch
from support.models import (
    Stack,
    assert_same_gradients,
    batch_of,
    compiled,
    compiled_each_way,
    each_way,
    either_transport,
    mean_square,
    mine,
    shard,
)
from support.retained_graphs import compare_two_losses, two_losses


@each_way
@either_transport
def test_two_losses_of_one_forward(run_ranks, how, transport):
    run_ranks(2, compare_two_losses, how, transport)


def _after_one_that_releases(how):
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks)
    run = compiled(model, how)
    batch = batch_of(4, 8)
    mean_square(run, mine(batch)).backward()
    mean_square(reference, batch).backward()
    loss, whole = mean_square(run, mine(batch)), mean_square(reference, batch)
    for _ in range(2):
        loss.backward(retain_graph=True)
        whole.backward(retain_graph=True)
    assert_same_gradients(model, reference)


@each_way
def test_a_graph_may_be_retained_after_backwards_that_released_theirs(run_ranks, how):
    run_ranks(2, _after_one_that_releases, how)


def _changed_in_between(how, transport):
    model = Stack()
    settings = {"transport": transport, "reshard_after_forward": True}
    model, reference = shard(model, model.blocks, **settings)
    batch = batch_of(4, 8)
    outputs = compiled(model, how)(mine(batch)), reference(batch)
    for output in outputs:
        output.square().mean().backward(retain_graph=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    for parameter in reference.parameters():
        parameter.data.mul_(2)  # plain PyTorch refuses a change that it notices
    for output in outputs:
        output.sin().mean().backward()
    assert_same_gradients(model, reference)


@each_way
@either_transport
def test_the_second_backward_computes_with_what_parameters_are_then(run_ranks, how, transport):
    run_ranks(2, _changed_in_between, how, transport)


@pytest.mark.usefixtures("one_rank")
@compiled_each_way
def test_a_graph_that_was_compiled_without_donation_may_be_retained(how):
    model, reference = shard(Stack(depth=1))
    batch = batch_of(4, 8)
    for _ in range(2):  # compiled, then loaded
        run = compiled(model, how)
        with torch._functorch.config.patch(donated_buffer=False):
            mean_square(run, batch).backward()
        two_losses(run, batch)
        mean_square(reference, batch).backward()
        two_losses(reference, batch)
        assert_same_gradients(model, reference)
        torch._dynamo.reset()


@pytest.mark.inductor
@pytest.mark.usefixtures("one_rank")
def test_a_graph_without_parameters_may_be_retained():
    x = torch.randn(4, requires_grad=True)
    loss = torch.compile(lambda x: (x.sin() * x.cos()).sum(), backend="zero3")(x)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x).cos().detach())
