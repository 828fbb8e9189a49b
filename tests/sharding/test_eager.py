"""The sharded model without a compiler: when weights are gathered, and what autograd may do."""

import weakref

import pytest
import torch
from support.job import needs_a_job
from support.models import (
    Block,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    mean_square,
    mine,
    optimizers_of,
    shard,
    shard_stack,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import fully_shard, record_collectives


def _gathers(log):
    return [c.params for c in log if c.op == "all_gather"]


# ---- when a weight is gathered


class _Peeking(Block):
    """A block that records what it reads in forward."""

    def forward(self, x):
        self.seen = self.up.weight
        return super().forward(x)


def _reads():
    model = _Peeking(8)
    model, reference = shard(model)
    for _ in range(2):
        assert isinstance(model.up.weight, DTensor)
        assert model.up.weight is model.up._parameters["weight"]
        model(batch_of(2, 8))
        assert not isinstance(model.seen, DTensor)
        assert torch.equal(model.seen, reference.up.weight)
    assert isinstance(model.up.weight, DTensor)


def test_a_weight_is_whole_in_forward_and_sharded_outside(run_ranks):
    run_ranks(2, _reads)


def _gathered_groups():
    model, reference = shard_stack()
    with record_collectives() as log:
        assert_same_step(model, reference, batch_of(4, 8))
    names = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"]
    blocks = [[f"blocks.{i}.{name}" for name in names] for i in range(2)]
    forward, backward = _gathers(log)[:3], _gathers(log)[3:]
    assert forward == [*blocks, ["head.weight", "head.bias"]], forward
    owners = [{fqn.rpartition(".")[0].rpartition(".")[0] for fqn in group} for group in backward]
    assert owners == [{"blocks.1"}, {"blocks.0"}], backward  # the head was kept


def test_a_block_is_gathered_at_a_time_and_again_in_backward(run_ranks):
    run_ranks(2, _gathered_groups)


# ---- who reads a weight


class _FromOutside(nn.Module):
    """A module that reads weights of modules that never run."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(batch_of(8, 8, seed=i)) for i in range(2)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(batch_of(8))})
        self.block = Block(8)  # sharded separately, and only read

    def forward(self, x):
        for weight in self.list:
            x = (x @ weight).tanh()
        return nn.functional.linear(x, self.block.up.weight, None)[:, :8] + self.named["bias"]


def _read_from_outside():
    model = _FromOutside()
    model, reference = shard(model, [model.block])
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, optimizers=optimizers)
        assert isinstance(model.list[0], DTensor)
        assert isinstance(model.block.up.weight, DTensor)


def test_a_weight_may_be_read_in_the_forward_of_an_enclosing_module(run_ranks):
    run_ranks(2, _read_from_outside)


def _block_by_itself():
    model, reference = shard_stack()
    block, whole = model.blocks[0], reference.blocks[0]
    for _ in range(2):
        mean_square(block, mine(batch_of(4, 8))).backward()
        mean_square(whole, batch_of(4, 8)).backward()
        assert_same_gradients(model, reference)
    assert_same_step(model, reference, batch_of(4, 8, seed=1))


def test_a_block_may_run_by_itself(run_ranks):
    run_ranks(2, _block_by_itself)


# ---- what autograd may do


def _backward_twice():
    model, reference = shard_stack()
    for m, batch in ((model, mine(batch_of(4, 8))), (reference, batch_of(4, 8))):
        loss = mean_square(m, batch)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, reference)


def test_a_retained_graph_may_run_backward_twice(run_ranks):
    run_ranks(2, _backward_twice)


def _saved_elsewhere():
    model, reference = shard_stack()
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = mean_square(model, mine(batch_of(4, 8)))
    loss.backward()
    mean_square(reference, batch_of(4, 8)).backward()
    assert_same_gradients(model, reference)
    assert (2, 8) in packed, "activations are the user's to pack"
    assert (16, 8) not in packed, "gathered weights are not"


def test_saved_tensors_hooks_of_the_user_get_the_activations(run_ranks):
    run_ranks(2, _saved_elsewhere)


class _Views(nn.Module):
    """A module of which autograd saves views of the weight and a product of the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(batch_of(6, 8))

    def forward(self, x):
        first, second = self.weight.chunk(2)
        x = torch.einsum("bi,oi->bo", x, first) * first.exp().sum()
        return x @ second.t()[:3] @ self.weight[::2]


def _views():
    model, reference = shard(_Views())
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch * 1e-2, optimizers=optimizers)


def test_views_of_a_weight_are_gathered_again_for_backward(run_ranks):
    run_ranks(2, _views)


# ---- what saved-tensors hooks must not change


class _Overwrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.sigmoid(self.first(x))
        result = self.second(hidden)
        hidden.mul_(0)
        return result


@needs_a_job
def test_overwriting_what_backward_needs_is_found_out():
    model = fully_shard(_Overwrites())
    loss = model(torch.randn(2, 4)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_a_job
def test_an_output_that_its_own_node_saves_is_freed_without_a_backward():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()))
    output = weakref.ref(model(torch.randn(2, 4)))
    assert output() is None


class _InferenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.inference_mode():
            self.linear(x)
        return self.linear(x)


@needs_a_job
def test_inference_inside_of_a_forward_loses_no_gradient():
    model, reference = shard(_InferenceFirst())
    assert_same_step(model, reference, batch_of(2, 4))


class _ReadByAnother(nn.Module):
    """A module whose block is compiled by another backend, which may reuse its inputs' memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return x @ (self.weight * 2 + 1).tanh()


class _Checkpointed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


@needs_a_job
@pytest.mark.inductor
def test_inductor_alone_trains_convolutions():
    # It lays out 4-D tensors that a graph saves in the order of channels last.
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3)
    model, reference = shard(nn.Sequential(*layers))
    optimizers = optimizers_of(model, reference)
    run = torch.compile(model)
    for seed in range(2):
        batch = batch_of(2, 3, 8, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@needs_a_job
@pytest.mark.inductor
def test_inductor_alone_says_what_to_do_about_convolutions_in_a_checkpoint():
    layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    model, reference = shard(_Checkpointed(layers))
    batch = batch_of(2, 3, 8, 8)
    with pytest.raises(RuntimeError, match=r'backend="zero3", or with .*"layout_optimization"'):
        torch.compile(model)(batch)
    run = torch.compile(model, options={"layout_optimization": False})
    assert_same_step(model, reference, batch, run=run)


@needs_a_job
def test_a_block_compiled_by_another_backend_does_not_write_to_gathered_weights():
    model, reference = shard(nn.Sequential(nn.Linear(16, 16), _ReadByAnother()))
    model[1].compile(backend="inductor")
    x = torch.randn(4, 16)
    model.unshard()
    before = model[1].weight.detach().clone()
    with torch.no_grad():
        model[1](x)
        assert torch.equal(model[1].weight, before)
    model.reshard()
    for _ in range(2):
        torch.testing.assert_close(model(x), reference(x))


@needs_a_job
@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_computing_with_other_parameters_is_refused(how):
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    run = compiled(model, how)
    others = {name: parameter * 3 for name, parameter in model.named_parameters()}
    with pytest.raises(Exception, match=r"'0\.weight' is not a leaf now"):
        torch.func.functional_call(run, others, (torch.randn(2, 4),))


class _Complex(nn.Module):
    """Multiplies spectra by a parameter, which autograd saves as a complex view of real numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.weight = nn.Parameter(batch_of(6, 2, seed=3))
        self.negative = nn.Parameter(batch_of(6, 2, seed=4))

    def forward(self, x):
        spectrum = torch.fft.fft(self.linear(x)) * torch.view_as_complex(self.weight)
        return torch.fft.ifft(spectrum).real * torch.view_as_complex(self.negative).conj().imag


def _saves_complex_views():
    model, reference = shard(_Complex())
    assert_same_step(model, reference, batch_of(4, 6))


def test_views_of_another_dtype_are_saved_as_they_are(run_ranks):
    run_ranks(2, _saves_complex_views)


class _ListsItsParameters(nn.Linear):
    def forward(self, x):
        self.read = self.weight, next(self.parameters())
        with pytest.raises(AttributeError, match=r"not an nn\.Parameter"):
            self.get_parameter("weight")
        return super().forward(x)


@needs_a_job
def test_parameters_lists_shards_in_a_forward_too():
    model = fully_shard(_ListsItsParameters(4, 4))
    model(batch_of(2, 4))
    weight, listed = model.read
    assert not isinstance(weight, DTensor | nn.Parameter)
    assert listed is model.weight
