"""Graphs of unusual models keep all invariants, and train as in one process."""

import copy

import pytest
import torch
from support.job import needs_a_job
from support.models import assert_same_gradients, batch_of, compiled, each_way, shard
from support.partitioners import DefaultPartition
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import fully_shard, graph_pass

pytestmark = needs_a_job
WIDTH = 4


@graph_pass()
def nothing(gm, facts):
    """Changes nothing."""


class _Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def _breaks_the_graph_with_a_weight(self, x):
    weight = self.a.weight
    y = x @ weight
    torch._dynamo.graph_break()
    return self.b(y @ weight)


def _breaks_the_graph(self, x):
    y = self.a(x)
    torch._dynamo.graph_break()
    y = y.sin().exp().tanh()
    torch._dynamo.graph_break()
    return self.b(y)


def _loops(self, x):
    def body(i, y):
        return i + 1, y * 2

    with torch.no_grad():
        start = torch.tensor(0), x
        _, y = torch.while_loop(lambda i, y: i < 3, body, start)
    return self.b(self.a(y))


def _multiplies_weights(self, x):
    return F.linear(x, F.linear(self.a.weight, self.b.weight)) + self.a(x)


def _weighs_a_weight(self, x):
    return x + (self.a.weight * self.b.weight).sum()


def _computes_ahead(self, x):
    with torch.no_grad():
        y = self.a.weight.t() * 2
    return self.b(self.a(x).tanh()) + y


def _drops_out(self, x):
    return checkpoint(lambda x: F.dropout(self.b(self.a(x)), 1e-9), x, use_reentrant=False)


FORWARDS = (
    _breaks_the_graph_with_a_weight,
    _breaks_the_graph,
    _loops,
    _multiplies_weights,
    _weighs_a_weight,
    _computes_ahead,
    _drops_out,
)


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("passes", [[], [nothing]], ids=["", "with a pass"])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.thin
def test_unusual_models_train(forward, passes, reshard_after_forward):
    model = _Model(forward)
    reference = copy.deepcopy(model)
    for layer in (model.a, model.b):
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    run = compiled(model, "interpreted", gather_bucket_mb=1e-6, passes=passes)
    x = batch_of(WIDTH, WIDTH)

    run(x).square().sum().backward()
    reference(x).square().sum().backward()

    assert_same_gradients(model, reference)


def test_a_partitioner_may_save_views_of_parameters():
    model = fully_shard(_Model(lambda self, x: self.b(self.a(x))), reshard_after_forward=False)
    config = {"custom_partitioner_fn": DefaultPartition("one")}
    run = compiled(model, "zero3", inductor_config=config)
    run(batch_of(2, WIDTH)).sum().backward()


def test_a_loop_without_parameters_is_compiled():
    def loop(x):
        start = torch.tensor(0), x
        return torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), start)[1]

    run = torch.compile(loop, backend="zero3", options={"inductor": False, "passes": [nothing]})
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 8.0))


class _ReturnsItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x)).relu(), self.first.weight.t()


@each_way
@pytest.mark.parametrize("reshards", [None, False, True])
@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_a_graph_may_return_a_weight_that_is_kept(how, transport, reshards):
    settings = {"transport": transport, "reshard_after_forward": reshards}
    model, reference = shard(_ReturnsItsWeight(), **settings)
    for forward in (compiled(model, how), reference):
        output, weight = forward(batch_of(4, 4))
        (output.sum() + weight.square().sum()).backward()
    assert_same_gradients(model, reference)
