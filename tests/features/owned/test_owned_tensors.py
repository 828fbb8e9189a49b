"""An owned parameter is a tensor on all ranks, and what an owner cannot do is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    mean_square,
    mine,
    step,
)
from support.owned_models import muon_and_adam, owned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from deepcompile_zero3 import Owned, Zero3Error, explain, fully_shard

# ---- what is done with a DTensor


def _as_a_tensor():
    weight = batch_of(6, 4)
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(weight.clone())
    layer.weight.grad = weight + 1
    fully_shard(layer, shard_placement_fn=lambda p: Owned(1) if p.dim() == 2 else None)
    parameter = layer.weight
    assert torch.equal(parameter.grad.full_tensor(), weight + 1)
    for tensor, expected in (
        (parameter * 2, weight * 2),
        (parameter.detach().double().t(), weight.double().t()),
        (torch._foreach_norm([parameter])[0], weight.norm()),
        (parameter.sum(), weight.sum()),
        (copy.deepcopy(parameter), weight),
        (copy.deepcopy(layer.state_dict())["weight"], weight),
    ):
        torch.testing.assert_close(tensor.full_tensor().detach(), expected)
    parameter.grad = None
    penalty = parameter.full_tensor().square().sum()
    penalty.backward()
    torch.testing.assert_close(parameter.grad.full_tensor(), 2 * weight)
    assert parameter.device.type == "cpu"
    assert parameter.detach().to("meta").is_meta


def test_an_owned_parameter_is_a_tensor_on_all_ranks(run_ranks):
    run_ranks(2, _as_a_tensor)


def _in_lists():
    weights = [batch_of(6, 4), batch_of(4, 6, seed=1), batch_of(6, 6, seed=2)]
    owner = {(6, 4): Owned(1), (4, 6): Owned(0), (6, 6): None}
    layers = nn.Sequential(*(nn.Linear(*w.shape[::-1], bias=False) for w in weights))
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(weight.clone())
    fully_shard(layers, shard_placement_fn=lambda p: owner[tuple(p.shape)])
    sharded = [*layers.parameters()]
    norms = torch._foreach_norm([each.detach() for each in sharded])
    for norm, weight in zip(norms, weights, strict=True):
        torch.testing.assert_close(norm.full_tensor(), weight.norm())
    with torch.no_grad():
        torch._foreach_mul_(sharded, [2.0, 3.0, 4.0])
    for each, weight, factor in zip(sharded, weights, (2, 3, 4), strict=True):
        torch.testing.assert_close(each.full_tensor().detach(), factor * weight)


def test_tensors_of_several_owners_are_computed_with_together(run_ranks):
    run_ranks(2, _in_lists)


def _kernels(kernel):
    def placement(parameter):
        return Owned(len(parameter) % 2) if parameter.dim() == 2 else None

    model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 8))
    reference = copy.deepcopy(model)
    fully_shard(model, shard_placement_fn=placement)
    optimizers = [torch.optim.AdamW(m.parameters(), **kernel) for m in (model, reference)]
    for seed in range(2):
        mean_square(model, mine(batch_of(8, 8, seed=seed))).backward()
        mean_square(reference, batch_of(8, 8, seed=seed)).backward()
        step(optimizers)
    assert_same_parameters(model, reference)


@pytest.mark.parametrize("kernel", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_kernels_of_many_parameters_step_those_of_all_owners(run_ranks, kernel):
    run_ranks(2, _kernels, kernel)


def _copied():
    layer = nn.Linear(4, 6)
    layer.weight.label = "up"
    layer.weight.grad_dtype = torch.bfloat16
    layer.weight.grad = batch_of(6, 4).bfloat16()
    fully_shard(layer, shard_placement_fn=lambda p: Owned(1) if p.dim() == 2 else None)
    copied = copy.deepcopy(layer.weight)
    assert isinstance(copied, nn.Parameter)
    assert (copied.label, copied.grad_dtype) == ("up", torch.bfloat16)
    assert torch.equal(copied.grad.full_tensor(), batch_of(6, 4).bfloat16())
    assert copied.grad is not layer.weight.grad


def test_a_copy_of_an_owned_parameter_has_its_gradient_and_attributes(run_ranks):
    run_ranks(2, _copied)


def _late_step(how, transport, settings):
    """A step between a forward and its backward, after which all ranks gather again."""
    model, reference, _ = owned(Stack(), transport=transport, **settings)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    run = compiled(model, how)
    for each in (model, reference):
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
    losses = run(mine(batch_of(8, 8))).square().mean(), reference(batch_of(8, 8)).square().mean()
    with torch.no_grad():
        step(optimizers)
    losses[0].backward()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        reference(batch_of(8, 8)).square().mean().backward()
    assert_same_gradients(model, reference)


@pytest.mark.parametrize(
    ("transport", "settings"),
    [
        ("shared_memory", {"reshard_after_forward": True}),
        ("c10d", {"reshard_after_forward": True}),
        ("c10d", {"reshard_after_forward": 2}),
    ],
)
def test_all_ranks_notice_a_step_between_forward_and_backward(run_ranks, transport, settings):
    run_ranks(4, _late_step, "eager", transport, settings)


def _scaled(overflows):
    model, reference, owners = owned(Stack())
    optimizers = muon_and_adam(model, owners)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    scaler.scale(mean_square(model, mine(batch_of(8, 8)))).backward()
    mean_square(reference, batch_of(8, 8)).backward()
    if overflows and (owner := owners.rank_of["blocks.0.up.weight"]) == dist.get_rank():
        model.blocks[0].up.weight.grad.to_local()[0] = float("inf")
        assert owner in (0, 1)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    if not overflows:
        assert_same_gradients(model, reference)
    scaler.step(optimizers[0])
    scaler.update()
    for name in owners.rank_of:
        is_same = torch.equal(model.get_parameter(name).full_tensor(), before[name])
        assert is_same == overflows, name
    return scaler.get_scale()


@pytest.mark.parametrize("overflows", [True, False])
def test_a_scaler_skips_a_step_on_all_ranks_or_on_none(run_ranks, overflows):
    assert run_ranks(2, _scaled, overflows) == [2.0 if overflows else 4.0] * 2


# ---- errors


def _refusals():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"Owned\(rank=2\) for 'weight', which is sharded over 2"):
        fully_shard(model, shard_placement_fn=lambda p: Owned(2))
    with pytest.raises(TypeError, match=r"Owned\(rank=1.0\) for .*: its rank is an int"):
        fully_shard(model, shard_placement_fn=lambda p: Owned(1.0))
    with pytest.raises(Zero3Error, match="owner="):
        fully_shard(model, shard_placement_fn=lambda p: Owned(dist.get_rank()))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    parallel = nn.Linear(4, 4)
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight, mesh["tp"], [Shard(0)]))
    with pytest.raises(NotImplementedError, match="'weight' is a DTensor already"):
        fully_shard(parallel, mesh=mesh["dp"], shard_placement_fn=lambda p: Owned(0))
    fully_shard(model, shard_placement_fn=lambda p: Owned(0) if p.dim() == 2 else None)
    assert "weight" in str(explain(model, batch_of(2, 4)))
    with pytest.raises(NotImplementedError, match="cannot be redistributed"):
        model.weight.redistribute(placements=[Shard(0)])
    with pytest.raises(NotImplementedError, match=r"can be redistributed over .* only, not"):
        model.weight.redistribute(mesh["tp"], [Replicate()])


@pytest.mark.smoke
def test_what_an_owner_cannot_do_is_refused(run_ranks):
    run_ranks(2, _refusals)
