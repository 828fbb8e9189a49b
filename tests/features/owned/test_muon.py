"""``Muon``: batches of matrices are updated as torch's Muon updates each of them."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.models import batch_of, mean_square, mine, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from deepcompile_zero3 import MatrixOwners, Muon, Owned, Zero3Error, fully_shard

OPTIONS = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9}


class _Mixture(nn.Module):
    """Attention-like layer with one matrix for three, experts, and a matrix: [b, 8] -> [b, 8]."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.experts = nn.Parameter(batch_of(3, 8, 8, seed=1) / 3)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(torch.einsum("bi,eij->bj", torch.tanh(q * k + v), self.experts))


def _matrices_of(value, name):
    if name == "qkv.weight":
        return value.chunk(3)
    return value.unbind() if value.dim() == 3 else [value]


def _groups(model):
    return [
        {"params": [model.experts, model.out.weight]},
        {"params": [model.qkv.weight], "matrices": 3, "lr": 0.03},
    ]


def _expected(reference, gradients_of_steps):
    """Returns what torch's Muon makes of each matrix by itself, given the gradients of steps."""
    expected = {}
    for name, gradients in gradients_of_steps.items():
        whole = reference.get_parameter(name).detach()
        lr = 0.03 if name == "qkv.weight" else OPTIONS["lr"]
        parts = [nn.Parameter(part.clone()) for part in _matrices_of(whole, name)]
        optimizer = torch.optim.Muon(parts, **OPTIONS | {"lr": lr})
        for gradient in gradients:
            for part, its_gradient in zip(parts, _matrices_of(gradient, name), strict=True):
                part.grad = its_gradient.clone()
            optimizer.step()
        expected[name] = torch.cat([part.detach().flatten() for part in parts]).view_as(whole)
    return expected


def _updates_batches():
    model = _Mixture()
    owners = MatrixOwners(model)
    assert {*owners.rank_of} == {"qkv.weight", "out.weight"}
    model, reference = shard(model, shard_placement_fn=owners)
    optimizer = Muon(_groups(model), **OPTIONS)
    gradients = {"experts": [], "qkv.weight": [], "out.weight": []}
    for seed in range(2):
        mean_square(model, mine(batch_of(4, 8, seed=seed))).backward()
        for name, of_steps in gradients.items():
            parameter = model.get_parameter(name)
            of_steps.append(parameter.grad.full_tensor())
        with CommDebugMode() as collectives:
            optimizer.step()
        assert collectives.get_total_counts() == 0
        optimizer.zero_grad()
    for name, expected in _expected(reference, gradients).items():
        assert torch.equal(model.get_parameter(name).full_tensor(), expected), name


@pytest.mark.smoke
@pytest.mark.parametrize("world_size", [2, 4])  # three experts: some ranks have none
def test_batches_of_matrices_are_updated_one_by_one(run_ranks, world_size):
    run_ranks(world_size, _updates_batches)


def test_plain_parameters_are_updated_as_sharded_ones():
    torch.manual_seed(0)
    model = _Mixture()
    reference = copy.deepcopy(model)
    optimizer = Muon(_groups(model), **OPTIONS)
    mean_square(model, batch_of(4, 8)).backward()
    gradients = {
        name: [parameter.grad.clone()]
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1
    }
    optimizer.step()
    for name, expected in _expected(reference, gradients).items():
        assert torch.equal(model.get_parameter(name), expected), name
    state = optimizer.state_dict()
    again = Muon(_groups(model), **OPTIONS)
    again.load_state_dict(state)
    assert again.param_groups[1]["matrices"] == 3
    torch.testing.assert_close(again.state_dict(), state)


def _refuses_parts():
    model = fully_shard(_Mixture())
    assert isinstance(model.out.weight, DTensor)
    with pytest.raises(Zero3Error, match=r"\[8, 8\] is .*Shard.* parts of its matrices"):
        Muon([model.out.weight])
    Muon([model.experts])
    with pytest.raises(Zero3Error, match="parts of its matrices"):
        Muon([model.experts]).add_param_group({"params": [model.qkv.weight]})


def test_matrices_that_are_split_are_refused(run_ranks):
    run_ranks(2, _refuses_parts)


@pytest.mark.parametrize(
    ("parameter", "group", "message"),
    [
        (torch.ones(3), {}, r"a parameter of shape \[3\] is not a matrix.* use AdamW"),
        (torch.ones(4, 2), {"matrices": 3}, r"\[4, 2\] is not made of 3 .* to a divisor of 4"),
        (torch.ones(4, 2), {"matrices": 0}, r"\[4, 2\] is not made of 0 equal matrices"),
        (torch.ones(4, 2), {"matrices": 2.0}, r"\[4, 2\] is not made of 2.0 equal matrices"),
        (torch.ones(2, 4, 2), {"matrices": 2}, r"\[2, 4, 2\] is a batch .* leave out matrices"),
    ],
)
def test_what_is_no_matrix_is_refused(parameter, group, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(parameter)], **group}])
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])


def test_parameters_may_come_with_their_names():
    model = _Mixture()
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    optimizer = Muon(matrices.items())
    assert optimizer.param_groups[0]["param_names"] == [*matrices]
    with pytest.raises(ValueError, match=r"^'qkv\.bias' of shape \[24\] is not a matrix"):
        Muon(model.named_parameters())


def test_parameters_without_an_order_are_refused():
    with pytest.raises(TypeError, match="ordered collections"):
        Muon([{"params": {nn.Parameter(torch.ones(2, 2))}}])
    with pytest.raises(TypeError, match="one of the params is int"):
        Muon([3])


def _partial_sums():
    mesh = init_device_mesh("cpu", (2,))
    whole = batch_of(4, 6)
    weight = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
    reference = nn.Parameter(whole.clone())
    optimizers = [Muon([each], **OPTIONS) for each in (weight, reference)]
    for seed in range(2):
        part = batch_of(4, 6, seed=2 * seed + dist.get_rank())
        weight.grad = DTensor.from_local(part, mesh, [Partial()])
        reference.grad = weight.grad.full_tensor()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(weight.to_local(), reference)


def test_a_gradient_of_partial_sums_is_summed_first(run_ranks):
    run_ranks(2, _partial_sums)


def _compiled_step():
    model, reference = shard(_Mixture(), shard_placement_fn=lambda p: Owned(1))
    optimizers = [torch.optim.Muon([m.qkv.weight, m.out.weight]) for m in (model, reference)]
    steps = [torch.compile(optimizers[0].step, backend="eager"), optimizers[1].step]
    for seed in range(2):
        mean_square(model, mine(batch_of(4, 8, seed=seed))).backward()
        for name in ("qkv.weight", "out.weight"):
            parameter = model.get_parameter(name)
            reference.get_parameter(name).grad = parameter.grad.full_tensor()
        for step in steps:
            step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for name in ("qkv.weight", "out.weight"):
        value = model.get_parameter(name).full_tensor()
        assert torch.equal(value, reference.get_parameter(name)), name


def test_a_compiled_step_leaves_owned_parameters_to_python(run_ranks):
    run_ranks(2, _compiled_step)
