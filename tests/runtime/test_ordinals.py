"""Graphs of other backends, which save the ordinal of a parameter in place of its placeholder."""

import pytest
import torch
from functorch.compile import make_boxed_func, nop
from support.job import needs_a_job
from support.models import assert_same_gradients, compiled, in_backward, shard
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.sharding.module_parameters import parameters_of

pytestmark = needs_a_job


def _model():
    model = fully_shard(nn.Linear(4, 3, bias=False))
    model(torch.ones(1, 4))  # a forward passes the shards to the runtime
    return model


def _ordinal_of(model):
    placeholder = parameters_of(model)["weight"].placeholder
    return ops.unshard_with_ordinal.default(placeholder.detach(), "float32")[1]


def test_unshard_with_ordinal_is_as_its_fake():
    model = _model()
    placeholder = parameters_of(model)["weight"].placeholder.detach()
    full, ordinal = ops.unshard_with_ordinal.default(placeholder, "float32")
    with FakeTensorMode() as mode:
        fakes = ops.unshard_with_ordinal.default(mode.from_tensor(placeholder), "float32")

    assert torch.equal(full, model.weight.full_tensor())
    for real, fake in zip((full, ordinal), fakes, strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_a_gradient_may_come_with_an_ordinal():
    others, model = _model(), _model()
    assert not torch.equal(_ordinal_of(others), _ordinal_of(model))

    in_backward(lambda: ops.reduce_grad.default(torch.ones(3, 4), _ordinal_of(model)))

    assert others.weight.grad is None
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(3, 4))


def test_an_ordinal_outlives_its_model_as_nobodys():
    ordinal = _ordinal_of(_model())
    _model()

    with pytest.raises(RuntimeError, match="there is no such parameter: its model was deleted"):
        in_backward(lambda: ops.reduce_grad.default(torch.ones(3, 4), ordinal))


@pytest.mark.parametrize("numbers", [[], [1, 2], [[1]]])
def test_other_integers_are_no_ordinals(numbers):
    _model()
    numbers = torch.tensor(numbers, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="is the placeholder of no live sharded parameter"):
        in_backward(lambda: ops.reduce_grad.default(torch.ones(3, 4), numbers))


def test_nothing_is_gathered_by_an_ordinal():
    ordinal = _ordinal_of(_model())
    with pytest.raises(RuntimeError, match="is the placeholder of no live sharded parameter"):
        ops.unshard.default(ordinal, "float32")


class _ReturnsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 2)

    def forward(self, x):
        return self.layer.weight.detach(), self.layer(x).argmax(1)


@pytest.mark.parametrize("how", ["interpreted", "zero3"])
def test_a_forward_without_gradients_may_return_a_weight(how):
    model = _ReturnsWeight()
    weight = model.layer.weight.detach().clone()
    returned, _ = compiled(fully_shard(model), how)(torch.ones(1, 2, 4, 4))
    assert torch.equal(returned, weight)


class _UsesTwice(nn.Module):
    """Returns a weight beside a loss that reads it twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return self.layer(self.layer(x)).square().mean(), self.layer.weight * 1


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "aot_eager"},
        {"backend": "zero3", "options": {"inductor": False}},
        pytest.param({"backend": "zero3"}, marks=pytest.mark.more),
        pytest.param({"backend": "inductor"}, marks=pytest.mark.more),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_a_weight_of_four_dimensions_is_reduced_for_each_use(settings):
    model, reference = shard(_UsesTwice())
    run = torch.compile(model, **settings)
    x = torch.randn(1, 2, 4, 4)
    for each in (run, reference):
        loss, weight = each(x)
        (loss + weight.square().sum()).backward()
    assert_same_gradients(model, reference)


def test_a_graph_of_another_backend_does_not_save_the_placeholder_of_a_convolutions_weight():
    model, reference = shard(nn.Conv2d(2, 3, 2, bias=False))
    saved = []  # kinds of the nodes of the weight's shape that the forward saves

    def forward_graph(graph, inputs):
        (outputs,) = graph.graph.output_node().args
        nodes = [node for node in outputs if node.meta["val"].shape == model.weight.shape]
        saved.extend(node.op for node in nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward_graph, bw_compiler=nop)
    x = torch.randn(1, 2, 4, 4)
    for each in (torch.compile(model, backend=backend), reference):
        each(x).square().mean().backward()
    assert "placeholder" not in saved
    assert_same_gradients(model, reference)
