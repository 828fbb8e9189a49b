"""Recurrent modules of torch, which keep a list of their weights, train as in one process."""

import pytest
import torch
from support.models import (
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    mine,
    shard,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from deepcompile_zero3 import record_collectives
from deepcompile_zero3.torch_release import RELEASE

WIDTH = 5
RNNS = {
    "LSTM": lambda: nn.LSTM(WIDTH, 6, num_layers=2, bidirectional=True, proj_size=3),
    "GRU": lambda: nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True, dropout=0.0),
    "RNN": lambda: nn.RNN(WIDTH, 6, bias=False, nonlinearity="relu"),
}


class _Recurrent(nn.Module):
    def __init__(self, build, packs):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.rnn = build()
        self.head = nn.Linear(6, 2)
        self._packs = packs

    def forward(self, x):
        """x: [batch, time, WIDTH]"""
        batch_first = self.rnn.batch_first
        x = torch.tanh(self.up(x))
        x = x if batch_first else x.transpose(0, 1)
        if self._packs:
            x = pack_padded_sequence(x, [4, 2], batch_first)
        hidden, _ = self.rnn(x)
        if self._packs:
            hidden, _ = pad_packed_sequence(hidden, batch_first)
        hidden = hidden if batch_first else hidden.transpose(0, 1)
        return self.head(hidden)


def _trains(kind, how):
    """Compares three steps with one process, then changes the module's dtype and back."""
    model = _Recurrent(RNNS[kind], packs=kind != "RNN" and how != "one graph")
    model, reference = shard(model, [] if kind == "GRU" else [model.rnn])
    assert list(model.state_dict()) == list(reference.state_dict())
    assert "_flat_weights" not in vars(model.rnn)
    run = model if how == "eager" else compiled(model, "interpreted", fullgraph=how == "one graph")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for seed in range(3):
        batch = batch_of(4, 4, WIDTH, seed=seed)
        with torch._dynamo.config.patch(allow_rnn=how == "one graph"), record_collectives() as log:
            run(mine(batch)).square().mean().backward()
        # What both sides of a graph break use is gathered twice. torch 2.15 breaks the graph twice.
        breaks_twice = how == "graph breaks" and RELEASE >= (2, 15)
        gathers = [c for c in log if c.op == "all_gather"]
        assert len(gathers) <= (6 if breaks_twice else 4)
        for rows in batch.chunk(2):
            (reference(rows).square().mean() / 2).backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
    model.double().float()  # torch fills its list anew
    for name, weight in zip(model.rnn._flat_weights_names, model.rnn._flat_weights, strict=True):
        assert weight is model.rnn.get_parameter(name)


@pytest.mark.thin
@pytest.mark.parametrize("how", ["eager", "one graph", "graph breaks"])
@pytest.mark.parametrize("kind", list(RNNS))
def test_recurrent_modules_train_as_in_one_process(run_ranks, kind, how):
    run_ranks(2, _trains, kind, how)
