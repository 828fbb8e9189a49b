"""What goes over the wire, and in which order, depends on parameters and not on the batch.

Ranks see batches of their own, in number and in length; were one of them to gather or to reduce
anything in another order, they would exchange the wrong bytes or wait for ever.
"""

import pytest
import torch
import transformer_models
from models import compiled
from one_rank import one_rank  # noqa: F401
from torch import nn

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives

pytestmark = pytest.mark.usefixtures("one_rank")


def _collectives(run, batch):
    with record_collectives() as log:
        run(**batch).loss.backward()
    return [(record.op, record.dtype, record.nbytes, record.params) for record in log]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", "interpreted"),
        ("gpt2", "interpreted"),
        ("vit", "interpreted"),
        ("llama", "zero3"),
    ],
)
def test_batches_of_all_sizes_have_the_same_collectives(name, how):
    task = getattr(transformer_models, name)()
    for block in task.blocks:
        fully_shard(block)
    model = fully_shard(task.model)
    collectives = []
    for size in (1, 3, 200):
        torch._dynamo.reset()  # as on a rank that sees only batches of this size
        collectives.append(_collectives(compiled(model, how), task.batch(size, seed=0)))
    assert collectives[0] == collectives[1] == collectives[2]


class _AdditiveAttention(nn.Module):
    """Scores of ``[batch]`` queries and 64 keys in eight parts.

    For one query it takes less memory to save the sums; for three, to save what is summed and to
    sum again, for which backward would need ``bias``.
    """

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 1)
        self.key = nn.Linear(8, 64)
        self.bias = nn.Parameter(torch.randn(1, 64))

    def forward(self, x):
        keys = sum(self.key(i * x.sum(0, keepdim=True)) for i in range(8))
        return torch.cos(self.query(x) + keys + self.bias)


def test_backward_gathers_no_more_because_that_would_save_memory():
    model = fully_shard(_AdditiveAttention())
    gathered = []
    for size in (1, 3):
        torch._dynamo.reset()
        with record_collectives() as log:
            compiled(model, "interpreted")(torch.randn(size, 8)).sum().backward()
        gathered.append([record.params for record in log if record.op == "all_gather"])
    assert gathered == [[["key.weight", "key.bias", "query.weight", "query.bias", "bias"]]] * 2


class _Scaled(nn.Module):
    """A weight whose cast, square root and norm take part."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 16))

    def forward(self, x):
        weight = self.weight.sqrt() / self.weight.norm()
        return torch.tanh(x @ weight)


def test_what_is_computed_of_a_weight_alone_is_not_kept_for_backward():
    model = fully_shard(nn.Sequential(_Scaled(), nn.Linear(16, 16), _Scaled()))
    with capture_graphs() as graphs, torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend="zero3")(torch.randn(2, 16)).sum().backward()
    saved = graphs.forward[0].graph_module.graph.output_node().all_input_nodes
    large = [n.name for n in saved if n.op != "placeholder" and n.meta["val"].numel() >= 16 * 16]
    assert large == []
