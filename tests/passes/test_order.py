"""Collectives and their order depend on parameters, not on the batch.

Ranks see different batches, in number and in length. If one rank gathered or reduced in another
order, the ranks would exchange the wrong bytes or wait for ever.
"""

import pytest
import torch
import torch.distributed as dist
from support import transformer_models
from support.job import needs_a_job
from support.models import (
    INDUCTOR_TOO,
    Stack,
    assert_same_gradients,
    batch_of,
    compiled,
    compiled_each_way,
    each_way,
    in_little_memory,
    mean_square,
    shard,
)
from torch import nn

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives
from deepcompile_zero3.graph.metadata import fqns_of


def _collectives(run, batch):
    with record_collectives() as log:
        run(**batch).loss.backward()
    return [(record.op, record.dtype, record.nbytes, record.params) for record in log]


@needs_a_job
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", "interpreted"),
        pytest.param("gpt2", "interpreted", marks=pytest.mark.long),
        pytest.param("vit", "interpreted", marks=pytest.mark.long),
        pytest.param("llama", "zero3", marks=INDUCTOR_TOO),
    ],
)
def test_batches_of_all_sizes_have_the_same_collectives(name, how):
    task = getattr(transformer_models, name)()
    for block in task.blocks:
        fully_shard(block)
    model = fully_shard(task.model)
    collectives = []
    for size in (1, 3, 200):
        torch._dynamo.reset()  # like a rank that sees only batches of this size
        collectives.append(_collectives(compiled(model, how), task.batch(size, seed=0)))
    assert collectives[0] == collectives[1] == collectives[2]


def _order_of_a_step(how):
    model = Stack()
    for block in model.blocks:
        fully_shard(block)
    run = compiled(fully_shard(model, transport="c10d"), how)
    with record_collectives() as log:
        run(torch.ones(2, 8)).sum().backward()
    return [(record.op, record.params) for record in log]


@pytest.mark.more
@pytest.mark.parametrize("how", [pytest.param("eager", marks=pytest.mark.long), "interpreted"])
def test_the_order_depends_on_no_hash_and_no_address(run_spawned, how):
    # Forked ranks would agree on the order of a set by chance.
    one, other = run_spawned(_order_of_a_step, how)
    assert one == other != []


class _TiedEnds(nn.Module):
    """A model that uses a weight first and last, and others in between."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8))
        self.middle = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        x = x @ self.table
        for layer in self.middle:
            x = layer(x)
        return x @ self.table.t()


@needs_a_job
def test_no_reduction_waits_for_that_of_a_weight_whose_gradient_comes_last():
    model = fully_shard(_TiedEnds())
    with capture_graphs() as graphs:
        compiled(model, "interpreted")(torch.randn(2, 8)).sum().backward()
    reductions = graphs.backward[0].graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.zero3.reduce_grad.default
    )
    order = [fqns_of(node)[0] for node in reductions]
    assert order == [*(f"middle.{layer}.weight" for layer in (2, 1, 0)), "table"]


@needs_a_job
def test_a_backward_first_gathers_the_weight_that_a_forward_uses_last():
    model = fully_shard(_TiedEnds(), transport="c10d")
    run = compiled(model, "interpreted", gather_bucket_mb=1e-4)  # one weight each
    loss = run(torch.randn(2, 8, requires_grad=True)).sum()  # so that backward needs all weights
    with record_collectives() as log:
        loss.backward()
    gathered = [fqn for record in log if record.op == "all_gather" for fqn in record.params]
    assert gathered == ["table", *(f"middle.{layer}.weight" for layer in (2, 1, 0))]


class _Positions(nn.Module):
    """A model that uses as many rows of a parameter as the sequence has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.positions = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        return self.linear(x) * self.positions[: len(x)].mean(0)


class _AdditiveAttention(nn.Module):
    """A model of scores of ``[batch]`` queries and 64 keys in eight parts.

    For one query, saving the sums takes less memory. For three queries, saving the addends and
    summing again takes less memory, for which backward needs ``bias``.
    """

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 1)
        self.key = nn.Linear(8, 64)
        self.bias = nn.Parameter(torch.randn(1, 64))

    def forward(self, x):
        keys = sum(self.key(i * x.sum(0, keepdim=True)) for i in range(8))
        return torch.cos(torch.maximum(self.query(x) + keys, self.bias))


def _encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


# A model and the shape of an input row, by name.
_SHAPES_MATTER = {
    "positions": (_Positions, (8,)),
    "additive attention": (_AdditiveAttention, (8,)),
    # Some ops have another decomposition for one row.
    "encoder": (_encoder, (5, 16)),
    "one output": (lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)), (8,)),
}


@pytest.mark.thin
@needs_a_job
@pytest.mark.parametrize("bucket_mb", [64.0, 1e-4])
@compiled_each_way
@pytest.mark.parametrize("name", _SHAPES_MATTER)
def test_collectives_are_the_same_where_shapes_change_the_graph(name, how, bucket_mb):
    build, shape = _SHAPES_MATTER[name]
    model = fully_shard(build())
    collectives = []
    for rows in (1, 3, 9):
        torch._dynamo.reset()
        run = compiled(model, how, gather_bucket_mb=bucket_mb)
        with record_collectives() as log:
            run(torch.randn(rows, *shape)).sum().backward()
        by_kind = {"all_gather": [], "reduce_scatter": []}
        for record in log:
            by_kind[record.op].append((record.dtype, record.nbytes, record.params))
        collectives.append(by_kind)
    assert collectives[0] == collectives[1] == collectives[2]


def _train_on_batches_of_different_sizes(name, how, reshard_after_forward):
    build, shape = _SHAPES_MATTER[name]
    settings = {"reshard_after_forward": reshard_after_forward}
    model, reference = shard(build().double(), **settings)  # some gradients are nearly zero
    run = compiled(model, how)
    world_size = dist.get_world_size()
    for step in range(3):
        sizes = [1 + 2 * who * step for who in range(world_size)]
        batches = [batch_of(size, *shape, seed=size).double() for size in sizes]
        mean_square(run, batches[dist.get_rank()]).backward()
        for batch in batches:
            (mean_square(reference, batch) / world_size).backward()
        assert_same_gradients(model, reference)


@pytest.mark.thin
@each_way
@pytest.mark.parametrize(
    ("name", "reshard_after_forward"),
    [
        ("encoder", None),
        pytest.param("encoder", True, marks=pytest.mark.more),
        ("one output", None),
        ("positions", None),
    ],
)
def test_ranks_may_have_batches_of_different_sizes(run_ranks, name, reshard_after_forward, how):
    train = _train_on_batches_of_different_sizes
    run_ranks(2, in_little_memory, train, name, how, reshard_after_forward)


class _Scaled(nn.Module):
    """A model that uses a cast, a square root and a norm of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 16))

    def forward(self, x):
        weight = self.weight.sqrt() / self.weight.norm()
        return torch.tanh(x @ weight)


@needs_a_job
def test_functions_of_a_weight_alone_are_not_kept_for_backward():
    model = fully_shard(nn.Sequential(_Scaled(), nn.Linear(16, 16), _Scaled()))
    with capture_graphs() as graphs, torch.autocast("cpu", torch.bfloat16):
        compiled(model, "interpreted")(torch.randn(2, 16)).sum().backward()
    saved = graphs.forward[0].graph_module.graph.output_node().all_input_nodes
    large = [n.name for n in saved if n.op != "placeholder" and n.meta["val"].numel() >= 16 * 16]
    assert large == []
