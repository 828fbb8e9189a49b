"""The methods of FSDP2 that say how and when gradients are reduced."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    either_transport,
    gathered_fqns,
    layers_of,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.func import functional_call

from deepcompile_zero3 import (
    Zero3Error,
    fully_shard,
    record_collectives,
)

# ---- gradients of gradients, and other parameters


def _penalty(model, rows):
    rows.requires_grad_()
    output = model(rows)
    [gradient] = torch.autograd.grad(output.sum(), rows, create_graph=True)
    return output.mean() + (gradient.norm(dim=1) - 1).square().mean()


def _penalized(transport, settings):
    model = Stack()
    model, reference = shard(model, model.blocks, transport=transport, **settings)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(8, 8, seed=seed)
        _penalty(model, mine(batch)).backward()
        _penalty(reference, batch).backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.thin
@either_transport
@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}], ids=["", "kept"])
def test_gradients_of_an_input_may_be_penalized_in_eager_code(run_ranks, transport, settings):
    run_ranks(2, _penalized, transport, settings)


def _averaged(how):
    model = Stack()
    model, reference = shard(model, model.blocks)
    run = compiled(model, how)
    averages = {name: each.detach() / 2 for name, each in model.named_parameters()}
    expected = {name: each.detach() / 2 for name, each in reference.named_parameters()}
    batch = batch_of(8, 8)
    for _ in range(2):
        found = functional_call(run, averages, (mine(batch),))
        torch.testing.assert_close(found, functional_call(reference, expected, (mine(batch),)))
        assert_same_step(model, reference, batch, run=run)  # with its own again


@each_way
def test_a_forward_may_read_averages_of_parameters(run_ranks, how):
    run_ranks(2, _averaged, how)


# ---- set_gradient_divide_factor


def _divided(how):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    reference = copy.deepcopy(model)
    first = fully_shard(model[0], mp_policy=policy)
    fully_shard(model)
    first.set_gradient_divide_factor(0.5)
    model.set_gradient_divide_factor(1)  # does not apply to `first`
    mean_square(compiled(model, how), mine(batch_of(4, 8))).backward()
    mean_square(reference, batch_of(4, 8)).backward()
    for layer, factor in ((reference[0], 0.5), (reference[1], 1)):
        for parameter in layer.parameters():
            parameter.grad *= dist.get_world_size() / factor
    assert_same_gradients(model, reference, tolerance=1e-3)


@each_way
def test_gradients_are_divided_by_the_factor_of_their_group(run_ranks, how):
    run_ranks(2, _divided, how)


@needs_a_job
@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), float("nan"), "2", True])
def test_a_factor_that_nothing_can_be_divided_by_is_refused(factor):
    with pytest.raises(ValueError, match=f"factor must be .* got {factor!r}"):
        fully_shard(nn.Linear(2, 2)).set_gradient_divide_factor(factor)


# ---- finalize_backward


def _raise_in_backward(model, batch):
    def fail(grad):
        raise KeyError("as asked for")

    x = mine(batch).requires_grad_()  # its gradient comes last
    x.register_hook(fail)
    with pytest.raises(KeyError):
        mean_square(model, x).backward()


def _finalized(how, transport):
    """Reduces the gradients of several backwards in a step of its own."""
    model = layers_of(8, 6, 4)
    model, reference = shard(model, [model[0]], transport=transport)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    with pytest.raises(Zero3Error, match="lies inside another sharded module"):
        model[0].set_manual_backward_finalization(True)
    with pytest.raises(Zero3Error, match=r"needs set_manual_backward_finalization\(True\)"):
        model.finalize_backward()
    model.set_manual_backward_finalization(True)
    assert model.finalize_backward() is None  # before the first forward: no effect
    for step in range(2):
        with record_collectives() as log:
            for micro in range(2):
                batch = batch_of(4, 8, seed=2 * step + micro)
                mean_square(run, mine(batch)).backward()
                mean_square(reference, batch).backward()
            assert not [c for c in log if c.op != "all_gather"]
            assert all(parameter.grad is None for parameter in model.parameters())
            model.finalize_backward(async_op=True).wait()
            reduced = sorted(p for c in log if c.op == "reduce_scatter" for p in c.params)
        assert reduced == ["0.weight", "1.weight"]
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    mean_square(run, mine(batch)).backward()
    with pytest.raises(Zero3Error, match=r"cannot change while gradients wait .*'1\.weight'"):
        model.set_manual_backward_finalization(False)
    model[0].reset_iter_state()
    model.reset_iter_state()
    model.finalize_backward()  # nothing is left
    _raise_in_backward(model, batch)
    with pytest.raises(Zero3Error, match=r"finalize_backward: a backward raised.* are lost"):
        model.finalize_backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_manual_backward_finalization(False)
    assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@each_way
@either_transport
def test_gradients_may_be_reduced_in_a_step_of_its_own(run_ranks, how, transport):
    run_ranks(2, _finalized, how, transport)


def _reduced_without_a_last(how):
    model, reference = shard(Stack(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    run = compiled(model, how)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    for seed in range(2):
        mean_square(run, mine(batch_of(4, 8, seed=seed))).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
    model.finalize_backward()  # sums without sync stay
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_requires_gradient_sync(True)
    model.finalize_backward(async_op=True).wait()
    assert_same_gradients(model, reference)
    model.finalize_backward()  # which finds nothing
    assert_same_gradients(model, reference)


@each_way
def test_micro_batches_may_be_reduced_without_a_last_backward(run_ranks, how):
    run_ranks(2, _reduced_without_a_last, how)


# ---- set_all_reduce_hook


def _hooked(how):
    """Sums gradients over other ranks in a hook, as replicas of the user's own."""
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    model[1].weight.requires_grad_(False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
    model, reference = shard(
        model, [model[0]], mesh=DeviceMesh.from_group(mesh.get_group(1), "cpu")
    )
    sizes = []

    def hook(flat):
        sizes.append(flat.numel())
        dist.all_reduce(flat)
        flat /= dist.get_world_size()

    with pytest.raises(TypeError, match="hook is a function of a tensor, got 3"):
        model.set_all_reduce_hook(3)
    model.set_all_reduce_hook(hook)
    model[0].set_all_reduce_hook(hook)
    assert_same_step(model, reference, batch_of(4, 8), run=compiled(model, how))
    assert sizes == [3 + 3 * 2 + 2, 8 * 5 + 5]


@each_way
def test_a_hook_may_sum_gradients_over_more_ranks(run_ranks, how):
    run_ranks(2, _hooked, how)


class _InAnyOrder(nn.Module):
    """Two layers, whose gradients come in another order on the second rank."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.is_swapped = False

    def forward(self, x):
        if self.is_swapped:
            right = self.right(x).tanh()
            return self.left(x) + right
        left = self.left(x)
        return left + self.right(x).tanh()


def _hooked_in_any_order(how):
    """Sums gradients over other ranks in a hook, where each rank has its own order."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
    model, reference = shard(_InAnyOrder(), mesh=DeviceMesh.from_group(mesh.get_group(1), "cpu"))
    model.is_swapped = dist.get_rank() == 1

    def hook(flat):
        dist.all_reduce(flat)
        flat /= dist.get_world_size()

    model.set_all_reduce_hook(hook)
    assert_same_step(model, reference, batch_of(4, 8), run=compiled(model, how))


@each_way
def test_a_hook_gets_gradients_in_one_order_on_all_ranks(run_ranks, how):
    run_ranks(2, _hooked_in_any_order, how)


def _replaced_by_a_hook():
    model, _ = shard(nn.Linear(8, 4))
    model.set_all_reduce_hook(
        lambda flat: setattr(model, "weight", nn.Parameter(model.weight.detach().clone()))
    )
    with pytest.raises(Zero3Error, match="'weight' was replaced by another parameter"):
        mean_square(model, batch_of(4, 8)).backward()


def test_a_hook_that_replaces_a_parameter_is_refused(run_ranks):
    run_ranks(1, _replaced_by_a_hook)


# ---- reset_iter_state


def _start_again(how):
    model, reference = shard(layers_of(8, 8, 4))
    run = compiled(model, how)
    model.set_requires_gradient_sync(False)
    mean_square(run, mine(batch_of(4, 8, seed=7))).backward()  # a sequence that is abandoned
    model.unshard()
    model.reset_iter_state()
    assert gathered_fqns(model) == []
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(False)
    model.set_force_sum_reduction_for_comms(True)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        assert_same_step(
            model, reference, batch_of(4, 8, seed=seed), run=run, optimizers=optimizers
        )


@each_way
def test_a_sequence_of_micro_batches_can_be_given_up(run_ranks, how):
    run_ranks(2, _start_again, how)


# ---- pipelines


def _in_a_pipeline():
    meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "shard"))
    model, reference = shard(Stack(), mesh=meshes["shard"])
    group = meshes["pipeline"].get_group()
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    for seed in range(2):
        batch, target = batch_of(8, 8, seed=seed), batch_of(8, 8, seed=seed + 9)
        with record_collectives() as log:
            schedule.step(mine(batch), target=mine(target))
        reduced = [fqn for c in log if c.op == "reduce_scatter" for fqn in c.params]
        assert sorted(reduced) == sorted(fqn for fqn, _ in model.named_parameters())  # once
        nn.functional.mse_loss(reference(batch), target).backward()
        assert_same_gradients(model, reference)
        model.zero_grad()  # the schedule scales what is in .grad
        reference.zero_grad()


def test_a_stage_of_a_pipeline_reduces_its_micro_batches_once(run_apart):
    run_apart(_in_a_pipeline)
