"""A frozen part ahead of all that is trained is not gathered in backward."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.models import Block, assert_same_gradients, batch_of, compiled, through_inductor_too
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives
from deepcompile_zero3.graph.metadata import fqns_of
from deepcompile_zero3.passes.spare import find_spared
from deepcompile_zero3.runtime import ops


class _Model(nn.Module):
    """Three blocks and a head: [batch, 8] -> [batch, 8]."""

    frozen: tuple[int, ...] = (0, 1)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block(index) for index in range(3))
        self.head = nn.Linear(8, 8)
        for index in self.frozen:
            self.blocks[index].requires_grad_(False)

    def block(self, index):
        return Block(8)

    def call(self, block, x):
        return block(x)

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


class _HeadOnly(_Model):
    frozen = (0, 1, 2)


class _Checkpointed(_Model):
    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class _WithoutGrad(_Model):
    """Nothing is frozen; the first blocks run without gradients."""

    frozen = ()

    def forward(self, x):
        with torch.no_grad():
            for block in self.blocks[:2]:
                x = block(x)
        return self.head(self.blocks[2](x))


class _FrozenBetween(_Model):
    frozen = (1,)


class _FrozenTwice(_Model):
    """The first block runs ahead of what is trained, and behind."""

    frozen = (0,)

    def forward(self, x):
        return self.head(self.blocks[0](self.blocks[1](self.blocks[0](x))))


class _TiedToTheHead(_Model):
    frozen = (0, 1)

    def __init__(self):
        super().__init__()
        self.blocks[1].own = nn.Linear(8, 8, bias=False)
        self.head.weight = self.blocks[1].own.weight

    def call(self, block, x):
        return block(x) if block is not self.blocks[1] else block(block.own(x))


class _CheckpointedWhole(_Model):
    """One checkpoint around frozen and trained blocks runs the frozen ones again in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class _Scaled(nn.Module):
    """A linear layer whose weight is computed of a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.register_buffer("scale", torch.full((8, 1), 0.5))

    def forward(self, x):
        return x @ (self.weight * self.scale).t()


class _Quantized(_Model):
    """The last block has frozen weights that are computed, between its trained ones."""

    def block(self, index):
        return nn.Sequential(nn.Linear(8, 8), _Scaled(), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("cls", "requires_grad", "expected"),
    [
        (_HeadOnly, False, {0, 1, 2}),
        (_Model, False, {0, 1}),
        (_Model, True, set()),  # gradients flow into the model's input
        (_Checkpointed, False, {0, 1}),
        (_WithoutGrad, False, {0, 1}),
        (_FrozenBetween, False, set()),
        (_FrozenTwice, False, set()),
        (_TiedToTheHead, False, {0}),
        (_CheckpointedWhole, False, set()),
        (_Quantized, False, {0, 1}),
    ],
)
def test_blocks_without_gradients_are_spared(cls, requires_grad, expected):
    model, found = cls(), {}

    def backend(gm, _):
        inputs = gm.graph.find_nodes(op="placeholder")
        parameters = [node for node in inputs if "parameters" in node.name]
        blocks = {type(block) for block in model.blocks}
        spared = find_spared(gm, parameters, blocks.__contains__)
        for node in parameters:
            index = node.name.split("blocks_modules_")[-1][0]
            found.setdefault(index, set()).add(node in spared)
        return gm.forward

    torch._dynamo.reset()
    x = torch.ones(4, 8, requires_grad=requires_grad)
    torch.compile(model, backend=backend, fullgraph=True)(x)
    assert {index for index, all_or_none in found.items() if all_or_none == {True}} == {
        str(each) for each in expected
    }


class _Normalized(nn.Sequential):
    """Statistics of batches, random numbers and a cast behind the last weight."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, x):
        return super().forward(x).double().float()


class _ReadInBackward(torch.autograd.Function):
    """Returns ``x``. Its backward reads ``y``."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y.tanh(), None


class _Trunk(_Model):
    """A frozen trunk with what partitioners compute again, and a table that belongs to no block."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8).requires_grad_(False)

    def block(self, index):
        return _Normalized() if index == 0 else Block(8)

    def forward(self, x):
        x = self.blocks[0](x + self.table(torch.arange(len(x)) % 5))
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        only_for_backward = self.blocks[1](x)
        return self.head(_ReadInBackward.apply(self.blocks[2](x), only_for_backward))


def _steps(how, transport):
    """Compares steps with one process; returns what each backward gathers."""
    torch.manual_seed(0)
    model = _Trunk()
    reference = copy.deepcopy(model)
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=True, transport=transport)
    options = {"inductor_config": {"fallback_random": True}} if how == "zero3" else {}
    run = compiled(model, how, fullgraph=True, **options)
    gathered = []
    for size in (4, 8):
        parts = batch_of(size, 8).split([size // 4 + 1, size - size // 4 - 1])
        for each in (model, reference):
            each.zero_grad()
        torch.manual_seed(1)
        out = run(parts[dist.get_rank()])
        with record_collectives() as log:
            out.sum().backward()
        for part in parts:
            torch.manual_seed(1)
            (reference(part).sum() / len(parts)).backward()
        assert_same_gradients(model, reference)
        gathered.append({fqn for c in log if c.op == "all_gather" for fqn in c.params})
    return gathered


@pytest.mark.parametrize("transport", ["auto", "c10d"])
@pytest.mark.parametrize("how", ["eager", "interpreted", through_inductor_too])
def test_a_frozen_trunk_is_gathered_in_forward_alone(run_ranks, how, transport):
    names = [fqn for fqn, _ in _Trunk().named_parameters()]
    expected = {fqn for fqn in names if fqn.startswith(("blocks.2", "head"))}
    if how == "eager":  # gathers the model's own group as a whole
        expected.add("table.weight")
    assert run_ranks(2, _steps, how, transport) == [[expected] * 2] * 2


class _InCheckpoints(_HeadOnly, _Checkpointed):
    """Each frozen block is checkpointed, and ends in operations without parameters."""

    def block(self, index):
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))


def test_a_checkpoint_of_a_frozen_block_computes_nothing_again(one_rank):
    model = _InCheckpoints()
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=True)
    with capture_graphs() as graphs:
        compiled(model, "interpreted")(torch.ones(4, 8)).sum().backward()
    backward = graphs.backward[0].graph_module.graph
    assert not backward.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)


@pytest.mark.parametrize("budget", [0.5, 1])
def test_a_memory_budget_gathers_all_that_it_may_compute_again(one_rank, budget):
    model = _Trunk()
    names = {fqn for fqn, _ in model.named_parameters()}
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=True)
    with (
        torch._functorch.config.patch(activation_memory_budget=budget),
        capture_graphs() as graphs,
    ):
        compiled(model, "interpreted")(torch.ones(4, 8)).sum().backward()
    starts = graphs.backward[0].graph_module.graph.find_nodes(
        op="call_function", target=ops.all_gather_start.default
    )
    trained = {fqn for fqn in names if fqn.startswith(("blocks.2", "head"))}
    assert {fqn for start in starts for fqn in fqns_of(start)} == (
        trained if budget == 1 else names
    )
