"""Modules of torch that keep, compute or share weights in their own way train as in one process."""

import gc
import weakref

import pytest
import torch
from support.models import (
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    each_way,
    mine,
    optimizers_of,
)
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from deepcompile_zero3 import fully_shard

WIDTH = 4


class _Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).t()


def _symmetric():
    layer = nn.Linear(WIDTH, WIDTH)
    register_parametrization(layer, "weight", _Symmetric())
    return layer


class _Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) * i for i in range(1, 3))
        self.shifts = nn.ParameterDict({"a": torch.zeros(WIDTH)})

    def forward(self, x):
        for scale in (*self.scales, *self.scales[:1], *self.scales[-1:]):
            x = x * scale
        return x + self.shifts["a"] + self.shifts.copy()["a"]


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(x)


class _Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.whole = nn.Transformer(WIDTH, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.whole(x, x)


class _Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(6, WIDTH)

    def forward(self, x):
        return x + self.bag(x.argsort(-1)[:, 0])[:, None]


class _Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x):
        return self.both(x, x.sin())


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, WIDTH)

    def forward(self, x):
        x = x + self.table(x.argsort(-1)[..., 0])
        return nn.functional.linear(x, self.table.weight)


class _WithScale(nn.Parameter):
    pass


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = _WithScale(torch.randn(WIDTH, WIDTH))
        self.weight.scale = torch.tensor(0.5)

    def forward(self, x):
        return nn.functional.linear(x, self.weight) * self.weight.scale


KINDS = {
    "parametrize": _symmetric,
    "parametrizations.weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "parametrizations.orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "parametrizations.spectral_norm": lambda: parametrizations.spectral_norm(
        nn.Linear(WIDTH, WIDTH)
    ),
    "weight_norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "ParameterList, ParameterDict": _Lists,
    "MultiheadAttention": _Attention,
    "TransformerEncoder": _Encoder,
    "Transformer": _Transformer,
    "EmbeddingBag": _Bags,
    "Bilinear": _Bilinear,
    "LSTMCell": lambda: nn.LSTMCell(WIDTH, WIDTH),
    "tied by use": _Tied,
    "attributes of a parameter": _Scaled,
}


class _Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.part = KINDS[kind]()

    def forward(self, x):
        x = self.up(x)
        if isinstance(self.part, nn.LSTMCell):
            return self.part(x[:, 0])[0]
        return self.part(x)


def _built(kind):
    torch.manual_seed(0)
    return _Model(kind)


def _trains(kind, how):
    model, reference = fully_shard(_built(kind)), _built(kind)
    assert list(model.state_dict()) == list(reference.state_dict())
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        batch = batch_of(4, 3, WIDTH, seed=seed)
        run(mine(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
    with torch.no_grad():
        ours, theirs = (each.eval()(batch) for each in (model, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("how", ["eager", "interpreted"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_modules_that_keep_weights_in_their_own_way_train_as_in_one_process(run_ranks, kind, how):
    run_ranks(2, _trains, kind, how)


class _Reversed(nn.ParameterList):
    """A list whose slices are in another order."""

    def __getitem__(self, index):
        found = super().__getitem__
        return (
            [*map(found, range(len(self) - 1, -1, -1))]
            if isinstance(index, slice)
            else found(index)
        )


class _ReadsReversed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = _Reversed([torch.ones(WIDTH), torch.full((WIDTH,), 2.0)])

    def forward(self, x):
        return x * self.weights[:][0]


def _reads_its_own_slices():
    model = fully_shard(_ReadsReversed())
    assert model(torch.ones(1, WIDTH))[0, 0] == 2.0


def test_slices_of_a_list_may_be_its_own(run_ranks):
    run_ranks(1, _reads_its_own_slices)


def _lives_of_parametrized_modules():
    """Returns how many of two modules are alive after all references to them are gone."""
    models = weakref.WeakSet()
    for how in ("eager", "interpreted"):
        model = fully_shard(nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))))
        compiled(model, how)(batch_of(2, WIDTH)).sum().backward()
        models.add(model[0])  # whose class torch has made for it, with properties that keep it
        del model
    torch._dynamo.reset()
    gc.collect()
    return len(models)


def test_a_parametrized_model_dies_with_its_last_reference(run_ranks):
    assert run_ranks(2, _lives_of_parametrized_modules) == [0, 0]


@pytest.mark.usefixtures("one_rank")
@each_way
def test_a_forward_reads_the_attributes_that_a_parameter_has_now(how):
    model, reference = fully_shard(_Scaled()), _Scaled()
    reference.load_state_dict({n: p.full_tensor() for n, p in model.named_parameters()})
    run = compiled(model, how)
    for scale in (0.5, 2.0, 3.0):
        for each in (model, reference):
            each._parameters["weight"].scale = torch.tensor(scale)
        torch.testing.assert_close(run(batch_of(2, WIDTH)), reference(batch_of(2, WIDTH)))
