"""Scenarios of FSDP2's own tests: unshard, optimizers, dtypes, states and meshes."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.fsdp2_scenarios import fqns, step
from support.job import needs_a_job
from support.models import (
    Block,
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
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import Zero3Error, fully_shard, record_collectives

either_way = pytest.mark.parametrize("how", ["interpreted", "eager"])


# ---- when things are gathered


def _kept_by_hand(how):
    """Returns how often each weight is gathered in a step in which only the outermost module keeps
    its weights. Then takes a step whose weights are resharded between forward and backward.
    """
    layers = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    model, reference = shard(nn.Sequential(*layers), layers[:1], reshard_after_forward=True)
    model.set_reshard_after_forward(False, recurse=False)
    run = compiled(model, how)
    batch = batch_of(4, 8).requires_grad_()
    with record_collectives() as log:
        assert_same_step(model, reference, batch, run=run)
    model.set_reshard_after_forward(False)
    loss = mean_square(run, mine(batch))
    for module in (model, model[0]):
        module.reshard()
    assert isinstance(model[0].weight, DTensor)
    assert isinstance(model[1].weight, DTensor)
    loss.backward()
    mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    return [fqns(log, "all_gather").count(name) for name in ("0.weight", "1.weight")]


@either_way
def test_the_outermost_module_alone_may_keep_its_weights_and_all_may_let_go(run_ranks, how):
    assert run_ranks(2, _kept_by_hand, how) == 2 * [[2, 1]]


class Recomputing(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _misguided():
    model = Recomputing(depth=3)
    reference = copy.deepcopy(model)
    first, second, third = model.blocks
    for modules in (first.up, [first, second], third, model):
        fully_shard(modules)
    first.set_modules_to_backward_prefetch([third])  # the third block's backward is over then
    third.set_modules_to_backward_prefetch([second, first.up])
    third.set_modules_to_forward_prefetch([first])
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, optimizers=optimizers)


def test_hints_that_mislead_change_no_gradient(run_ranks):
    run_ranks(2, _misguided)


def _checkpointed_alone():
    model = Stack()
    # Activations have the shape of weights, so that a checkpoint does not notice a mix-up.
    model.blocks[1] = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    model, reference = shard(model, model.blocks)
    for early_stop in (True, False):
        kwargs = {"use_reentrant": False, "early_stop": early_stop}
        for i in range(2):
            batch = batch_of(16, 8, seed=i).requires_grad_()
            checkpoint(model.blocks[i], mine(batch), **kwargs).square().mean().backward()
            mean_square(reference.blocks[i], batch).backward()
        assert_same_gradients(model, reference)


def test_a_block_that_runs_by_itself_may_be_checkpointed(run_ranks):
    run_ranks(2, _checkpointed_alone)


# ---- optimizers


def _stepped_in_hooks(how):
    model, reference = shard(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)))
    run = compiled(model, how)
    adams = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    assert_same_step(model, reference, batch_of(4, 8), run=run)
    step(adams)
    for m in (model, reference):
        for parameter in m.parameters():
            own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

            def hook(parameter, own=own):
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(hook)
    for seed in range(1, 4):
        mean_square(run, mine(batch_of(4, 8, seed=seed))).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_parameters(model, reference, tolerance=1e-3)  # Adam first divides by small numbers


@each_way
def test_optimizers_may_change_and_step_in_hooks(run_ranks, how):
    run_ranks(2, _stepped_in_hooks, how)


# ---- dtypes


def _normalized(how):
    """Compares layers of all kinds in bfloat16, and a layer with its own casts, with FSDP2."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    own = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(output_dtype=torch.bfloat16)  # its statistics are not in bfloat16
    whole = Normalized()
    policies = {"last": own, "batch1d": mixed, "batch2d": mixed}
    results = []
    for sharding in (torch_fully_shard, fully_shard):
        model = copy.deepcopy(whole)
        for name, layer in model.named_children():
            sharding(layer, mp_policy=policies.get(name, low))
        sharding(model, mp_policy=low)
        run = compiled(model, how) if sharding is fully_shard else model
        output = run(mine(batch_of(4, 36)))
        output.square().mean().backward()
        grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
        results.append([output, *grads, *model.buffers()])
        assert model.last.seen == (torch.float32, torch.float32)
    for theirs, ours in zip(*results, strict=True):
        assert_close(ours, theirs, rtol=3e-2, atol=3e-3)  # also checks the dtype


class Casting(nn.Linear):
    """A layer with a further input, which it casts itself."""

    def forward(self, x, y):
        self.seen = x.dtype, y.dtype
        return super().forward((x + y).to(self.weight.dtype))


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.batch2d = nn.BatchNorm2d(4)
        self.up = nn.Linear(64, 16)
        self.batch1d = nn.BatchNorm1d(16)
        self.layer = nn.LayerNorm(16)
        self.last = Casting(16, 4)

    def forward(self, x):
        x = self.batch2d(self.conv(x.view(-1, 1, 6, 6))).flatten(1)
        x = self.layer(self.batch1d(self.up(x)))
        return self.last(x.float(), torch.ones(16))


@each_way
def test_normalization_and_casts_of_ones_own_are_those_of_fsdp2(run_ranks, how):
    run_ranks(2, _normalized, how)


class Noting(nn.Linear):
    """A layer that records the dtypes of its inputs."""

    def forward(self, x):
        self.noted = [*getattr(self, "noted", ()), x.dtype]
        return super().forward(x)


class Rerun(nn.Module):
    """A module that recomputes a whole layer in backward."""

    def __init__(self):
        super().__init__()
        self.layer = Noting(8, 8)
        self.given = []

    def through(self, x):
        x = self.layer(x)
        self.given.append(x.dtype)
        return x

    def forward(self, x):
        return checkpoint(self.through, x, use_reentrant=False, early_stop=False).float().sum()


@needs_a_job
@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_recomputation_casts_as_the_forward_did(output_dtype):
    model = Rerun()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output_dtype)
    fully_shard(model.layer, mp_policy=policy)
    fully_shard(model)(batch_of(2, 8)).backward()
    assert model.layer.noted == 2 * [torch.bfloat16]
    assert model.given == 2 * [output_dtype]
    assert model.layer.weight.grad.dtype == torch.float32


class WithCodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.ones(8, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return self.linear(x) * self.codes


@needs_a_job
@either_way
def test_a_parameter_frozen_at_first_is_reduced_in_its_dtype_later(how):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(WithCodes(), mp_policy=policy).requires_grad_(False)
    run = compiled(model, how)
    with torch.no_grad():
        run(batch_of(2, 8))
    model.linear.requires_grad_(True)
    with record_collectives() as log:
        run(batch_of(2, 8)).sum().backward()
    assert {c.dtype for c in log if c.op == "reduce_scatter"} == {torch.float32}
    assert model.linear.weight.grad.dtype == torch.float32
    assert model.codes.grad is None


# ---- states


def _state_dicts():
    model, reference = shard(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2)))
    state = model.state_dict()
    pointers = {name: tensor.to_local().data_ptr() for name, tensor in state.items()}
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        assert_same_step(model, reference, batch_of(4, 6, seed=seed), optimizers=optimizers)
    model.unshard()
    now = model.state_dict()
    assert list(now) == list(reference.state_dict())
    for name, tensor in now.items():
        assert isinstance(tensor, DTensor)
        assert tensor.to_local().data_ptr() == pointers[name]
        assert torch.equal(tensor, state[name])  # taken before
    model.reshard()
    model.load_state_dict({name: tensor.clone().fill_(3) for name, tensor in state.items()})
    for name, parameter in model.named_parameters():
        assert parameter.to_local().data_ptr() == pointers[name]
        assert (parameter.to_local() == 3).all()


def test_a_state_dict_shares_memory_with_the_model(run_ranks):
    run_ranks(2, _state_dicts)


def _piece_by_piece(how):
    reference = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    for module in (model[0], model):
        fully_shard(module)
    donor, _ = shard(reference, [reference[0]])
    for name, tensor in donor.state_dict().items():
        model.load_state_dict({name: tensor.clone()}, assign=True, strict=False)
    assert_close(compiled(model, how)(batch_of(4, 6)), donor(batch_of(4, 6)))


@either_way
def test_a_model_on_the_meta_device_is_loaded_piece_by_piece(run_ranks, how):
    run_ranks(2, _piece_by_piece, how)


class Scaled(nn.Module):
    """A module with a parameter that is computed from others."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5, bias=False)
        self.scale = nn.Parameter(torch.empty(5))

    def compute(self):
        self.scale = nn.Parameter(torch.linalg.norm(self.linear.weight.detach(), dim=1))

    def forward(self, x):
        return self.linear(x) * self.scale


def _computed(how):
    with torch.device("meta"):
        model = Scaled()
    fully_shard(model.linear)
    fully_shard(model)
    model.linear.to_empty(device="cpu")
    reference = Scaled()
    with torch.no_grad():
        rows = model.linear.weight
        rows.copy_(distribute_tensor(reference.linear.weight, rows.device_mesh, [Shard(0)]))
    for m in (model, reference):
        m.compute()
    run = compiled(model, how)
    assert_same_step(model, reference, batch_of(4, 8), run=run)


@either_way
def test_a_parameter_may_be_computed_of_sharded_ones(run_ranks, how):
    run_ranks(2, _computed, how)


# ---- meshes


def _of_groups():
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    shards, replicas = pairs[rank // 2], pairs[2 + rank % 2]
    mesh = DeviceMesh.from_group(
        [replicas, shards],
        "cpu",
        mesh=torch.arange(4).view(2, 2),
        mesh_dim_names=("replicate", "shard"),
    )
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks, mesh=mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            if rank >= 2:
                parameter.fill_(7)
            dist.broadcast(parameter.to_local(), src=rank % 2, group=replicas)
    assert_same_parameters(model, reference)
    mean_square(model, mine(batch_of(4, 8))).backward()
    mean_square(reference, batch_of(4, 8)).backward()
    assert_same_gradients(model, reference)


def test_a_mesh_may_be_made_of_groups_and_replicas_of_the_first(run_ranks):
    run_ranks(4, _of_groups)


class Parallel(Block):
    """A block with tensor parallelism, and a layer without."""

    def __init__(self, width):
        super().__init__(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(super().forward(x))


def _in_three_dimensions():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = Parallel(8)
    reference = copy.deepcopy(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["replicate", "shard"])
    data = mesh["replicate"].get_group()
    for seed in range(2):
        mean_square(model, mine(batch_of(4, 8, seed=seed), data)).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        assert_same_gradients(model, reference)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(ours.full_tensor(), theirs)
    assert model.up.weight.device_mesh.ndim == 3


def test_replicas_may_be_tensor_parallel(run_ranks):
    run_ranks(4, _in_three_dimensions)


def _by_columns():
    place = lambda p: Shard(1) if p.dim() > 1 else None  # noqa: E731
    model = fully_shard(Block(8), shard_placement_fn=place)

    def see(module, args):
        assert all(p.is_contiguous() for p in (module.weight, module.bias))

    for layer in (model.up, model.down):
        layer.register_forward_pre_hook(see)
    model(mine(batch_of(4, 8))).sum().backward()
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad):
            assert tensor.is_contiguous()
            assert tensor.to_local().is_contiguous()


def test_shards_of_columns_are_contiguous(run_ranks):
    run_ranks(2, _by_columns)


# ---- one rank


@needs_a_job
@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_one_rank_divides_by_the_factor_too(factor):
    model = fully_shard(nn.Linear(8, 4, bias=False))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(torch.ones(3, 8)).sum().backward()
    assert torch.equal(model.weight.grad.to_local(), torch.full((4, 8), 3 / (factor or 1)))


# ---- subclasses


@needs_a_job
def test_a_parameter_of_a_tensor_subclass_is_refused():
    model = nn.Linear(4, 4, bias=False)
    weight = model.weight.detach()
    model.weight = nn.Parameter(TwoTensor(weight, 2 * weight))
    with pytest.raises((Zero3Error, NotImplementedError), match=r"'weight' is a.* TwoTensor"):
        fully_shard(model)
    assert type(model) is nn.Linear
