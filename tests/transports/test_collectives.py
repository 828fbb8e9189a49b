"""Steps by collectives in the way of NCCL, on CPUs: see like_nccl.cpp.

``pytest --transport collectives`` runs other tests in this way too.
"""

import copy
import math
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.experts import (
    FOUR,
    SEVERAL,
    THREE,
    TWO,
    Experts,
    loss_of_all,
    train_experts,
    train_in_several_forwards,
)
from support.mesh_models import replicas
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    optimizers_of,
    shard,
    step,
)
from support.random_backwards import random_backwards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3 import (
    Owned,
    Zero3Error,
    fully_shard,
    quantize_gradients,
    record_collectives,
    step_in_backward,
)


def _train(how, mesh_of=None, **settings):
    """Takes steps of a model with tensors that travel alone, and others that share a message."""
    model = Stack(width=192)
    mesh = mesh_of and mesh_of()
    model, reference = shard(model, model.blocks, mesh=mesh, **settings)
    run, optimizers = compiled(model, how), optimizers_of(model, reference)
    for seed in range(3):
        batch = batch_of(12, 192, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@each_way
@pytest.mark.thin
@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_are_those_of_the_whole_model(run_collectives, how, world_size):
    run_collectives(world_size, _train, how)


@pytest.mark.first(how="eager")
@each_way
def test_replicas_agree(run_collectives, how):
    run_collectives(4, _train, how, replicas)


def _train_where_shards_are_whole(transport, factor):
    with mock.patch.dict(os.environ):
        del os.environ["ZERO3_TRANSPORT"]
        model = nn.Linear(1500, 1500)  # the weight's gradient travels alone
        mesh = replicas(dist.get_world_size())
        model, reference = shard(model, mesh=mesh, transport=transport)
    model.set_gradient_divide_factor(factor)
    batch = batch_of(4, 1500)
    for _ in range(2):
        mean_square(model, mine(batch)).backward()
        (mean_square(reference, batch) * dist.get_world_size() / factor).backward()
    assert_same_gradients(model, reference)


@pytest.mark.thin
@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("transport", ["auto", "c10d"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_that_has_all_rows_need_not_send_them(
    run_collectives, world_size, transport, factor
):
    run_collectives(world_size, _train_where_shards_are_whole, transport, factor)


def _train_uneven_rows():
    model, reference = shard(nn.Linear(1500, 1499))  # the weight's gradient is above 8 MiB
    assert_same_step(model, reference, batch_of(4, 1500))


def test_rows_of_a_large_gradient_need_not_divide_by_the_ranks(run_collectives):
    run_collectives(2, _train_uneven_rows)


def _train_owned(how):
    _train(how, shard_placement_fn=lambda p: Owned(1) if p.dim() == 2 else None)


@each_way
def test_matrices_have_an_owner(run_collectives, how):
    run_collectives(2, _train_owned, how)


class _Coded(nn.Module):
    """Frozen parameters of dtypes that NCCL does not know."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.small = nn.Parameter(torch.arange(36).view(6, 6).to(torch.int16), requires_grad=False)
        self.large = nn.Parameter(
            torch.arange(6 << 16).view(-1, 6).to(torch.int16), requires_grad=False
        )
        self.eighth = nn.Parameter(
            torch.linspace(-1, 1, 36).view(6, 6).to(torch.float8_e4m3fn), requires_grad=False
        )

    def forward(self, x):
        of_large = self.large.sum(0) / 1e6  # integers: the same in any order
        return x @ self.small.float() * self.scale + x @ self.eighth.float() + of_large


def _train_coded(how):
    model, reference = shard(_Coded())
    assert_same_step(model, reference, batch_of(4, 6), run=compiled(model, how))


@each_way
def test_parameters_of_any_dtype_are_gathered(run_collectives, how):
    run_collectives(2, _train_coded, how)


def _disagree():
    model = nn.Linear(4, 4 + dist.get_rank())
    with pytest.raises(Zero3Error, match="disagree on the module's parameter 0"):
        fully_shard(model)
    assert type(model) is nn.Linear


def _disagree_on_the_transport():
    with mock.patch.dict(os.environ):
        del os.environ["ZERO3_TRANSPORT"]
        transport = "shared_memory" if dist.get_rank() == 0 else "auto"
        with pytest.raises(Zero3Error, match="ranks disagree on the transport"):
            fully_shard(nn.Linear(4, 4), transport=transport)
        with pytest.raises(Zero3Error, match="needs a process group of gloo on CPUs"):
            fully_shard(nn.Linear(4, 4), transport="shared_memory")


@pytest.mark.parametrize("on", ["parameters", "transport"])
def test_ranks_that_disagree_get_an_error(run_collectives, on):
    run_collectives(2, _disagree if on == "parameters" else _disagree_on_the_transport)


def _on_the_wire(how):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(Stack(width=192), mp_policy=policy)[0]
    run = compiled(model, how)
    with record_collectives() as log:
        run(batch_of(4, 192)).float().square().mean().backward()
    assert {(each.op, each.dtype) for each in log} == {
        ("all_gather", torch.bfloat16),
        ("reduce_scatter", torch.float32),
    }


@each_way
def test_the_wire_has_the_dtypes_of_the_policy(run_collectives, how):
    run_collectives(2, _on_the_wire, how)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("width", [8, 256])  # sent together, and alone
def test_experts_that_some_ranks_use_are_trained(run_collectives, width, micro_batches):
    run_collectives(2, train_experts, TWO, width, "c10d", micro_batches, (2,))


def test_each_gradient_that_some_ranks_have_may_fill_a_bucket(run_collectives):
    run_collectives(3, train_experts, THREE, 150, "c10d", 2, (3,), 600)


@pytest.mark.thin
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_experts_that_some_replicas_use_are_trained(run_collectives, micro_batches):
    run_collectives(4, train_experts, FOUR, 8, "c10d", micro_batches, (2, 2))


@pytest.mark.parametrize("width", [8, 256])
def test_ranks_may_use_experts_in_other_forwards(run_collectives, width):
    run_collectives(2, train_in_several_forwards, SEVERAL, width, "c10d", (2,), 2)


def test_random_backwards_give_exact_means(run_collectives):
    raised = run_collectives(2, random_backwards, "c10d", 500)
    assert raised[0] == raised[1] > 10


def _chosen(model):
    """Returns a loss for which each rank uses an expert of its own."""
    return mean_square(lambda x: model(x, [dist.get_rank()]), mine(batch_of(2, 8)))


def _raises(message, requires_gradient, grad_dtype):
    model = fully_shard(Experts(8))
    for parameter in model.parameters():
        parameter.grad_dtype = grad_dtype
    model.set_requires_gradient_on_all_ranks(requires_gradient)
    model.set_reduce_scatter_unused_params(not requires_gradient)
    with pytest.raises(Zero3Error, match=message):
        _chosen(model).backward()
    for parameter in model.parameters():
        assert parameter.grad is None
        parameter.grad_dtype = torch.float32
    model.set_requires_gradient_on_all_ranks(False)
    model.set_reduce_scatter_unused_params(True)
    _chosen(model).backward()
    assert model.experts[1].weight.grad is not None


def test_a_gradient_that_only_some_ranks_have_may_be_an_error(run_collectives):
    message = "has a gradient on rank 0, has no gradient on rank 1"
    run_collectives(2, _raises, message, True, torch.float32)


def test_zeros_need_a_dtype_that_all_ranks_know(run_collectives):
    message = "different gradients of 'experts.0.weight', .* grad_dtype is None"
    run_collectives(2, _raises, message, False, None)


def _two_models():
    """Each rank uses an expert of its own in each model; gradients of one model come first."""
    torch.manual_seed(0)
    references = [Experts(8), Experts(8)]
    models = copy.deepcopy(references)
    for model in models:
        fully_shard(model).set_reduce_scatter_unused_params(True)
    batch = batch_of(4, 8)
    choices = ((0,), (1,))

    def loss(first, second, rows, chosen):
        return mean_square(lambda x: second(first(x, ()), chosen), rows)

    # On rank 0, the first gradient is one of the second model that the other rank lacks.
    loss(*models, mine(batch), choices[dist.get_rank()]).backward()
    parts = zip(batch.chunk(2), choices, strict=True)
    (sum(loss(*references, rows, chosen) for rows, chosen in parts) / 2).backward()
    for model, reference in zip(models, references, strict=True):
        assert_same_gradients(model, reference)


def test_several_models_in_one_backward(run_collectives):
    run_collectives(2, _two_models)


def _some_are_owned():
    """Experts have an owner, and are stepped in the backward."""
    torch.manual_seed(0)
    reference = Experts(8)
    model = fully_shard(
        copy.deepcopy(reference), shard_placement_fn=lambda p: Owned(1) if p.dim() == 2 else None
    )
    model.set_reduce_scatter_unused_params(True)
    optimizers = optimizers_of(model, reference)
    step_in_backward(model, optimizers[0])
    for seed, choices in enumerate(TWO):
        batch = batch_of(4, 8, seed=seed)
        mean_square(lambda x, c=choices: model(x, c[dist.get_rank()]), mine(batch)).backward()
        loss_of_all(reference, batch, choices).backward()
        step(optimizers[1:])
        assert_same_parameters(model, reference)


def test_experts_may_have_owners_and_be_stepped_in_the_backward(run_collectives):
    run_collectives(2, _some_are_owned)


def _reduce_in_float16(shape, quantized):
    """Reduces gradients whose sums exceed float16's maximum, 65504, but whose means do not."""
    model = nn.Linear(24, 8, bias=False)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    fully_shard(model, mesh=init_device_mesh("cpu", shape), mp_policy=policy)
    if quantized:
        quantize_gradients(model, quantized)
    model(torch.full((1, 24), 40000.0)).sum().backward()
    gradient = model.weight.grad.full_tensor()
    torch.testing.assert_close(gradient, torch.full_like(gradient, 40000.0))


@pytest.mark.parametrize("quantized", [None, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(3, 1), (1, 2), (2, 2)], ids=str)
def test_a_mean_over_replicas_that_fits_float16_does_not_overflow(
    run_collectives, shape, quantized
):
    run_collectives(math.prod(shape), _reduce_in_float16, shape, quantized)
