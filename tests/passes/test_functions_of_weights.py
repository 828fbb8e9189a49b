"""Functions of weights and constants are computed again in the backward, and never saved whole."""

import pytest
import torch
import torch.nn.functional as F
from support.job import needs_a_job
from support.models import batch_of, compiled
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import capture_graphs, fully_shard


def _without_a_row(weight, x):
    changed = weight.clone()
    changed[0] = 0.0
    return changed


FUNCTIONS = {
    "a number": lambda weight, x: weight * torch.tensor(2.0),
    "a tensor": lambda weight, x: weight / torch.as_tensor([2.0]),
    "rows": lambda weight, x: weight[[3, 2] * 8],
    "a row is written": _without_a_row,
    "the batch size": lambda weight, x: weight * (1 / x.shape[0]),
}


class _Model(nn.Module):
    def __init__(self, function, is_checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.function = function
        self.is_checkpointed = is_checkpointed

    def _multiply(self, x):
        return F.linear(x.sin(), self.function(self.weight, x))

    def forward(self, x):
        if self.is_checkpointed:
            return checkpoint(self._multiply, x, use_reentrant=False)
        return self._multiply(x)


@needs_a_job
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_of_the_weights_size_is_saved(name, is_checkpointed):
    reference = _Model(FUNCTIONS[name], False)
    model = fully_shard(_Model(FUNCTIONS[name], is_checkpointed))
    run = compiled(model, "interpreted")
    with capture_graphs() as graphs:
        for rows in (4, 5):
            x = batch_of(rows, 16).requires_grad_()
            for each in (run, reference):
                each(x).square().sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad)
    for graph in graphs.forward:
        saved = graph.graph_module.graph.output_node().all_input_nodes[1:]
        values = [n.meta["val"] for n in saved if n.op != "placeholder"]
        assert not any(v.shape[0] == 16 for v in values if isinstance(v, torch.Tensor)), saved
