"""Sharded modules that are converted to another dtype before their first forward."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.mesh_models import fsdp2_common
from support.models import (
    assert_same_gradients,
    batch_of,
    compiled,
    each_way,
    either_transport,
    optimizers_of,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from deepcompile_zero3 import Zero3Error, fully_shard, record_collectives
from deepcompile_zero3.sharding.module_parameters import registered_in


def _model(tied=True):
    """Returns layers whose rows do not divide by the ranks, of which one may be tied to another."""
    model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8), nn.Linear(8, 5), nn.Tanh())
    if tied:
        model[3].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def _take_steps(run, model, reference, optimizers):
    """Takes steps on the same batch on all ranks, so that the mean over ranks is exact."""
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed).to(model[0].weight.dtype)
        for forward in (run, reference):
            forward(batch).float().square().mean().backward()
        dtypes = [None if p.grad is None else p.grad.dtype for p in model.parameters()]
        assert dtypes == [None if p.grad is None else p.grad.dtype for p in reference.parameters()]
        assert_same_gradients(model, reference, tolerance=0.02)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _converted(how, transport, mesh):
    mesh = None if mesh is None else init_device_mesh("cpu", mesh)
    model = _model()
    reference = copy.deepcopy(model).bfloat16()
    reference[2].weight.grad_dtype = reference[3].weight.grad_dtype = torch.float64
    fully_shard([model[2], model[3]], mesh=mesh, transport=transport)
    fully_shard(model, mesh=mesh, transport=transport)
    model.set_gradient_divide_factor(2.0)
    optimizers = optimizers_of(model, reference)
    model.unshard()
    model.reshard()
    # Set, and kept through the conversion. The second is tied to a weight of another group.
    model[2].weight.grad_dtype = model[3].weight.grad_dtype = torch.float64
    parameters = list(model.parameters())

    model.half()
    model.bfloat16()

    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model[2].weight.grad_dtype == model[3].weight.grad_dtype == torch.float64
    run = compiled(model, how)
    with record_collectives() as log:
        _take_steps(run, model, reference, optimizers)
    assert {c.dtype for c in log if c.op == "all_gather"} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}

    model.half()  # too late
    with pytest.raises(Zero3Error, match=r"was torch\.bfloat16 .* torch\.float16 now; call \.to"):
        run(batch_of(4, 8).half())


@each_way
@either_transport
def test_a_module_may_be_converted_until_its_first_forward(run_ranks, how, transport):
    run_ranks(2, _converted, how, transport, None)


def test_replicas_may_be_converted(run_ranks):
    run_ranks(2, _converted, "interpreted", "c10d", (2, 1))


def _to_different_dtypes(transport):
    model = fully_shard(_model(), transport=transport)
    told = (
        r"'0\.weight', converted from torch\.float32 to .*; convert the module to one dtype on all "
        "ranks"
    )
    with pytest.raises(Zero3Error, match=told):
        model.to((torch.bfloat16, torch.float16)[dist.get_rank()])
    model.bfloat16()
    model(batch_of(4, 8).bfloat16()).sum().backward()
    assert model[0].weight.grad.dtype == torch.bfloat16


@either_transport
def test_ranks_that_convert_to_different_dtypes_get_an_error(run_ranks, transport):
    run_ranks(2, _to_different_dtypes, transport)


def _out_of_memory(*args):
    raise MemoryError


@needs_a_job
def test_a_conversion_that_fails_on_one_mesh_changes_no_parameter(monkeypatch):
    fsdp2 = fsdp2_common()
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    on_other = fsdp2.ShardPlacementResult(None, fsdp2.FSDPMeshInfo(other, shard_mesh_dim=0))
    model = nn.Linear(8, 5)
    fully_shard(model, shard_placement_fn=lambda p: on_other if p.dim() == 1 else None)
    connects = model._zero3_group.connects
    assert len(connects) == 2
    handles = [parameter.handle for parameter in registered_in(model)]
    with monkeypatch.context() as patch:
        patch.setitem(connects, [*connects][1], _out_of_memory)
        with pytest.raises(MemoryError):
            model.bfloat16()
    assert [parameter.handle for parameter in registered_in(model)] == handles
    model.bfloat16()
    model(batch_of(4, 8).bfloat16()).sum().backward()
    assert model.bias.grad.dtype == torch.bfloat16


def _loaded(how):
    """Loads bf16 values into a model of fp32, whose forwards compute in fp32 all the same."""
    model = _model(tied=False)  # assigning unties
    reference = copy.deepcopy(model).bfloat16()
    reference[2].weight.grad_dtype = torch.float64
    loaded = {
        name: value.bfloat16()
        for name, value in fully_shard(copy.deepcopy(model)).state_dict().items()
    }
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy)
    for _ in range(2):
        model[2].weight.grad_dtype = torch.float64
        model.load_state_dict(loaded, assign=True)
        assert isinstance(model[2].weight, DTensor)
        assert model[2].weight.grad_dtype == torch.float64  # inherited from the one before
    _take_steps(compiled(model, how), model, reference, optimizers_of(model, reference))


@each_way
def test_a_parameter_loaded_with_another_dtype_inherits_a_grad_dtype(run_ranks, how):
    run_ranks(2, _loaded, how)


@needs_a_job
@pytest.mark.parametrize("apart", [[3], [0, 3], [3, 0]], ids=str)
@pytest.mark.parametrize("missing", ["0.weight", "3.weight", None])
def test_a_tied_parameter_stays_tied_when_it_is_loaded(missing, apart):
    reference = _model()
    loaded = fully_shard(copy.deepcopy(reference)).state_dict()
    state = {name: value.clone() for name, value in loaded.items() if name != missing}
    with torch.device("meta"):
        model = _model()
    for layer in apart:
        fully_shard(model[layer])
    fully_shard(model)
    model.load_state_dict(state, assign=True, strict=False)
    assert model[0]._parameters["weight"] is model[3]._parameters["weight"]
    _take_steps(model, model, reference, optimizers_of(model, reference))
    found = model.state_dict()
    assert torch.equal(found["0.weight"].full_tensor(), found["3.weight"].full_tensor())
    assert_close(found["3.weight"].full_tensor(), reference[0].weight)


@needs_a_job
@each_way
@pytest.mark.parametrize("part", ["0", ""], ids=["part", "whole"])
def test_a_load_reshards_what_is_unsharded(how, part):
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    run, loaded = compiled(model, how), model.get_submodule(part)
    model.unshard()
    loaded.load_state_dict({name: torch.zeros_like(p) for name, p in loaded.named_parameters()})
    assert isinstance(model[0].weight, DTensor)
    assert torch.equal(run(batch_of(2, 4)), torch.zeros(2, 4))


@needs_a_job
@each_way
@pytest.mark.parametrize("part", ["0", ""], ids=["part", "whole"])
def test_a_state_dict_reshards_what_is_unsharded(how, part):
    """As in FSDP2: ``dcp.load`` writes to the tensors of a state dict."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    run = compiled(model, how)
    model.unshard()
    state = model.get_submodule(part).state_dict()
    assert isinstance(model[0].weight, DTensor)
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    assert torch.equal(run(batch_of(2, 4)), torch.zeros(2, 4))


@needs_a_job
@each_way
@pytest.mark.parametrize("places", [[0], [3], [0, 3]], ids=str)
def test_a_tied_parameter_may_not_be_untied_later(how, places):
    model = fully_shard(_model())
    run = compiled(model, how)
    run(batch_of(2, 8)).sum().backward()
    for place in places:
        model[place].weight = nn.Parameter(2 * model[0].weight.detach())
    with pytest.raises(
        Zero3Error, match=r"'0\.weight' was tied .*'weight' of a Zero3Linear is ano"
    ):
        run(batch_of(2, 8))
    model[3].weight = model[0].weight
    run(batch_of(2, 8)).sum().backward()


@needs_a_job
def test_one_place_of_a_tied_parameter_may_be_given_up():
    model = fully_shard(_model())
    model[3].weight = None
    model(batch_of(2, 8)).sum().backward()
    assert model[0].weight.grad is not None
