"""Meshes of two dimensions, parameters that are DTensors already, other dimensions than rows, and
groups of several modules, each beside one process or FSDP2.
"""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformer_models
from models import (
    INDUCTOR_TOO,
    Block,
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    optimizers_of,
    relative_difference,
    shard,
)
from one_rank import one_rank  # noqa: F401
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from deepcompile_zero3 import (
    Zero3Error,
    Zero3Module,
    buffer_stats,
    capture_graphs,
    defer_reduction,
    deposit_grad,
    fully_shard,
    record_collectives,
)
from deepcompile_zero3.sharding.module import parameters_of

either_way = pytest.mark.parametrize("how", ["interpreted", "eager"])
needs_a_job = pytest.mark.usefixtures("one_rank")


def replicas(number=2):
    """The mesh of four ranks, of which ``number`` have the same shards."""
    return init_device_mesh(
        "cpu", (number, dist.get_world_size() // number), mesh_dim_names=("replicate", "shard")
    )


def assert_same_step(model, reference, batch, *, run=None, optimizers=(), group=None):
    """Takes a step with both, on the whole and on this rank's part of it, and compares losses,
    gradients and parameters.

    Args:
        run: what is called in place of ``model``.
        group: the ranks that take different parts.
    """
    loss = mean_square(model if run is None else run, mine(batch, group))
    loss.backward()
    whole = mean_square(reference, batch)
    whole.backward()
    assert mean_of(loss, group) == pytest.approx(whole.item(), rel=1e-5)
    assert_same_gradients(model, reference)
    step(optimizers)
    assert_same_parameters(model, reference)


def step(optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def mean_of(loss, group=None):
    """The mean over the ranks."""
    dist.all_reduce(loss := loss.detach().clone(), group=group)
    return loss.item() / dist.get_world_size(group)


def summary(log, *ops):
    """The (op, bytes, number of parameters) of each collective, or of those of ``ops``."""
    return [(c.op, c.nbytes, len(c.params)) for c in log if not ops or c.op in ops]


def reductions(log):
    return [c.op for c in log if c.op != "all_gather"]


def held(model):
    """The full tensors that are held."""
    return [
        sharded.fqn
        for module in model.modules()
        for sharded in parameters_of(module).values()
        if sharded.handle.gathered is not None
    ]


# ---- a mesh (replicate, shard)


def _replicated(how, transport):
    """The collectives of a step, after two others beside one process."""
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks, mesh=replicas(), transport=transport)
    assert {p.placements for p in model.parameters()} == {(Replicate(), Shard(0))}
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        with record_collectives() as log:
            batch = batch_of(8, 8, seed=seed)
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    return summary(log)


HEAD, BLOCK = 4 * (8 * 8 + 8), 4 * (8 + 8 + 16 * 8 + 16 + 8 * 16 + 8)
BIASES = 4 * (16 + 8)  # of the block's linear layers, which an eager backward does not need
COMPILED = 2 * [("all_gather", BLOCK + HEAD, 8)]
EAGER = [("all_gather", BLOCK, 6), ("all_gather", HEAD, 2)]
GATHERS = {
    ("compiled", "shared_memory"): COMPILED,
    ("compiled", "c10d"): COMPILED,
    ("eager", "shared_memory"): [
        *EAGER,
        ("all_gather", 4 * 8 * 8, 1),
        ("all_gather", BLOCK - BIASES, 4),
    ],
    ("eager", "c10d"): [*EAGER, *reversed(EAGER)],
}


@each_way
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_replicas_train_as_one_process_and_sum_shards_in_one_all_reduce(run_ranks, how, transport):
    for collectives in run_ranks(4, _replicated, how, transport):
        assert collectives == [
            *GATHERS["eager" if how == "eager" else "compiled", transport],
            ("reduce_scatter", BLOCK + HEAD, 8),
            ("all_reduce", (BLOCK + HEAD) // 2, 8),
        ]


def _uneven_replicas(how, number):
    layers = nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)
    model, reference = shard(nn.Sequential(*layers), mesh=replicas(number))
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 6, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    return [parameter.to_local().shape[0] for parameter in model.parameters()]


@either_way
def test_rows_need_not_divide_by_the_ranks_of_a_replica(run_ranks, how):
    assert run_ranks(4, _uneven_replicas, how, 2) == 2 * [[4, 4, 3, 3, 1, 1], [3, 3, 2, 2, 0, 0]]


@either_way
def test_every_rank_may_have_the_whole_model(run_ranks, how):
    assert run_ranks(4, _uneven_replicas, how, 4) == 4 * [[7, 7, 5, 5, 1, 1]]


@either_way
def test_there_may_be_a_single_replica(run_ranks, how):
    assert run_ranks(4, _uneven_replicas, how, 1) == [
        [2, 2, 2, 2, 1, 1],
        [2, 2, 2, 2, 0, 0],
        [2, 2, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0],
    ]


class Branching(nn.Module):
    """Uses its second layer only when asked to."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x, both=False):
        x = torch.tanh(self.first(x))
        return self.second(x) if both else x


def backward(model, reference, seed, run=None, **kwargs):
    """Of a batch; returns its reductions."""
    batch = batch_of(8, 8, seed=seed)
    with record_collectives() as log:
        (model if run is None else run)(mine(batch), **kwargs).square().mean().backward()
        found = reductions(log)
    reference(batch, **kwargs).square().mean().backward()
    return found


def _micro_batches(how):
    model, reference = shard(Branching(), mesh=replicas())
    run = compiled(model, how)
    for step in range(2):  # the second one adds to the gradients of the first
        before = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
        seen = []
        for seed, (syncs, all_reduces) in enumerate([(False, True), (True, False), (True, False)]):
            model.set_requires_gradient_sync(syncs)
            model.set_requires_all_reduce(all_reduces)
            seen.append(backward(model, reference, 4 * step + seed, run, both=True))
            for parameter, grad in zip(model.parameters(), before, strict=True):
                if grad is None:
                    assert parameter.grad is None
                else:
                    assert torch.equal(parameter.grad.to_local(), grad)
        model.set_requires_all_reduce(True)
        seen.append(backward(model, reference, 4 * step + 3, run, both=True))
        scattered = ["reduce_scatter"]
        assert seen == [[], scattered, scattered, [*scattered, "all_reduce"]]
        assert_same_gradients(model, reference)


@either_way
def test_micro_batches_may_be_summed_over_replicas_once(run_ranks, how):
    run_ranks(4, _micro_batches, how)


def _only_in_the_first_micro_batch(how):
    model, reference = shard(Branching(), mesh=replicas())
    run = compiled(model, how)
    model.set_requires_all_reduce(False)
    backward(model, reference, 0, run, both=True)
    model.set_requires_all_reduce(True)
    with record_collectives() as log:
        backward(model, reference, 1, run)
    summed = [fqn for c in log if c.op == "all_reduce" for fqn in c.params]
    assert sorted(summed) == sorted(name for name, _ in model.named_parameters())
    assert reference.second.weight.grad is not None
    assert_same_gradients(model, reference)


@either_way
def test_a_gradient_of_the_first_micro_batch_alone_arrives(run_ranks, how):
    run_ranks(4, _only_in_the_first_micro_batch, how)


def _hooks():
    model, reference = shard(Branching(), mesh=replicas())
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    model.set_requires_all_reduce(False)
    backward(model, reference, 0, both=True)
    assert fired == []
    model.set_requires_all_reduce(True)
    backward(model, reference, 1, both=True)
    assert sorted(fired) == sorted(name for name, _ in model.named_parameters())


def test_hooks_on_accumulated_gradients_wait_for_the_all_reduce(run_ranks):
    run_ranks(4, _hooks)


def _one_layer_waits():
    """A part of the model is summed over replicas later than the rest."""
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks, mesh=replicas())
    model.blocks[0].set_requires_all_reduce(False)
    backward(model, reference, 0)
    assert all(parameter.grad is None for parameter in model.blocks.parameters())
    assert_same_gradients(model.head, reference.head)
    model.set_requires_all_reduce(False, recurse=False)
    model.blocks[0].set_requires_all_reduce(True)
    backward(model, reference, 1)
    assert_same_gradients(model.blocks, reference.blocks)
    model.set_requires_all_reduce(True)
    backward(model, reference, 2)
    assert_same_gradients(model, reference)


def test_blocks_may_be_summed_over_replicas_at_different_times(run_ranks):
    run_ranks(4, _one_layer_waits)


def _low_precision(how, reduce_dtype, tolerance):
    mesh = replicas()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, theirs = shard(Stack(depth=1), mesh=mesh, mp_policy=policy)
    torch_fully_shard(theirs, mesh=mesh, mp_policy=policy)
    run = compiled(model, how)
    for seed in range(2):
        rows = mine(batch_of(8, 8, seed=seed))
        with record_collectives() as log:
            for sharded, forward in ((model, run), (theirs, theirs)):
                sharded.set_requires_all_reduce(seed == 1)
                forward(rows).float().square().mean().backward()
    assert {c.dtype for c in log if c.op == "all_reduce"} == {reduce_dtype or torch.bfloat16}
    for (fqn, ours), expected in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert ours.grad.dtype == expected.grad.dtype, fqn
        local = ours.grad.to_local()
        copies = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(copies, local, group=mesh.get_group("replicate"))
        assert torch.equal(*copies), fqn
        assert relative_difference(local, expected.grad.to_local()) <= tolerance, fqn


@either_way
@pytest.mark.parametrize(
    ("reduce_dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (None, 1e-2)]
)
def test_replicas_get_the_same_bits_and_fsdp2s_values(run_ranks, how, reduce_dtype, tolerance):
    run_ranks(4, _low_precision, how, reduce_dtype, tolerance)


def _deferred():
    model, reference = shard(Branching(), mesh=replicas())
    late = torch.full((8, 8), 4.0)
    with record_collectives() as log, defer_reduction(model):
        for seed in range(2):
            backward(model, reference, seed)
        if dist.get_rank() == 3:
            deposit_grad(model.second.weight, late)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert reductions(log) == ["reduce_scatter", "all_reduce"]
    reference.second.weight.grad = late / 4
    assert_same_gradients(model, reference)

    model.set_requires_all_reduce(False)
    with record_collectives() as log, defer_reduction(model):
        backward(model, reference, 2)
    assert reductions(log) == ["reduce_scatter"]
    model.set_requires_all_reduce(True)
    backward(model, reference, 3)
    assert_same_gradients(model, reference)


def test_what_one_rank_deposits_reaches_its_replicas(run_ranks):
    run_ranks(4, _deferred)


def _divided():
    model, reference = shard(Branching(), mesh=replicas())
    model.set_gradient_divide_factor(2)
    backward(model, reference, 0)
    for parameter in reference.first.parameters():
        parameter.grad *= 4 / 2
    assert_same_gradients(model, reference)


def test_the_divide_factor_is_that_of_all_ranks(run_ranks):
    run_ranks(4, _divided)


def _given_up():
    model, reference = shard(Branching(), mesh=replicas())
    model.set_requires_all_reduce(False)
    backward(model, reference, 0, both=True)
    model.reset_iter_state()
    reference.zero_grad()
    model.set_requires_all_reduce(True)
    backward(model, reference, 1)
    assert_same_gradients(model, reference)


def test_what_is_not_summed_over_replicas_can_be_given_up(run_ranks):
    run_ranks(4, _given_up)


def _raising_between(transport):
    model = Stack()
    model, reference = shard(model, model.blocks, mesh=replicas(), transport=transport)

    def fail(grad):
        raise KeyError("as asked for")

    def set_trap(module, args, output):
        output.register_hook(fail)

    model.set_requires_all_reduce(False)
    backward(model, reference, 0)
    trap = model.blocks[0].register_forward_hook(set_trap)
    with contextlib.suppress(KeyError):
        model(mine(batch_of(8, 8))).sum().backward()
        raise AssertionError("nothing was raised")
    trap.remove()
    reference.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        model.set_requires_all_reduce(False)
        backward(model, reference, 2 * seed)
        model.set_requires_all_reduce(True)
        backward(model, reference, 2 * seed + 1)
        assert_same_gradients(model, reference)
        step(optimizers)
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_a_backward_that_raises_between_micro_batches_leaves_nothing(run_ranks, transport):
    run_ranks(4, _raising_between, transport)


def _clipped():
    model, reference = shard(Stack(), mesh=replicas())
    backward(model, reference, 0)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
    assert norms[0].full_tensor().item() == pytest.approx(norms[1].item(), rel=1e-5)
    assert_same_gradients(model, reference)


def test_gradients_of_replicas_are_clipped_by_the_norm_of_all(run_ranks):
    run_ranks(4, _clipped)


class _Products(nn.Module):
    """Its weights have the gradients that are asked for."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        self.second = nn.Parameter(torch.ones(2, 2, dtype=dtype))

    def forward(self, first, second, is_swapped=False):
        products = [(self.first, first), (self.second, second)]
        return sum((w * g).sum() for w, g in (products[::-1] if is_swapped else products))


def _sum_over_replicas():
    mesh = replicas(2)
    rank = dist.get_rank()

    tiny = 2.0**-24  # the least of float16, whose mean is as small
    model = fully_shard(
        _Products(), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)
    )
    model(tiny, 2.0, is_swapped=bool(rank)).backward()  # gradients come in another order
    assert (model.first.grad.full_tensor() == tiny).all()
    assert (model.second.grad.full_tensor() == 2).all()

    model = _Products(torch.bfloat16)
    model.first.grad_dtype = None
    fully_shard(model, mesh=mesh)
    for micro_batch in range(300):
        model.set_requires_all_reduce(micro_batch == 299)
        model(1.0, 0.0).backward()
    assert (model.first.grad.full_tensor() == 300).all()  # in bfloat16, 256 + 1 is 256


def test_what_is_summed_over_replicas_is_rounded_once(run_ranks):
    run_ranks(2, _sum_over_replicas)


def _small_and_large(transport):
    """In bfloat16, 256.5 + 0.5 is 256, and so is that + 1."""
    model = fully_shard(_Products(torch.bfloat16), transport=transport)
    model((256.0, 0.5, 0.5, 1.0)[dist.get_rank()], 0.0).backward()
    assert (model.first.grad.full_tensor() == 64.5).all()


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_sums_of_low_precision_are_rounded_once(run_ranks, transport):
    run_ranks(4, _small_and_large, transport)


def _halves(transport, shape, dtype):
    """The sum over the ranks is past the largest number of float16, 65504, and the mean is not."""
    mesh = init_device_mesh("cpu", shape)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = fully_shard(_Products(dtype), mesh=mesh, mp_policy=policy, transport=transport)
    tiny = 2.0**-24
    model(40000.0, tiny).backward()
    assert (model.first.grad.full_tensor() == 40000).all()
    assert (model.second.grad.full_tensor() == tiny).all()


@pytest.mark.thin
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)], ids=str)
def test_a_mean_that_fits_float16_does_not_overflow(run_ranks, shape, transport, dtype):
    run_ranks(math.prod(shape), _halves, transport, shape, dtype)


def _used_twice(how):
    model = _Products(torch.bfloat16)
    model.first.grad_dtype = torch.float32
    fully_shard(model, shard_placement_fn=lambda p: Shard(1))
    (compiled(model, how)(256.0, 0.0) + model(1.0, 0.0)).backward()
    assert (model.first.grad.full_tensor() == 257).all()

    class Twice(_Products):
        def forward(self):
            return (self.first * 256.0).sum() + (self.first * 1.0).sum()

    model = Twice(torch.bfloat16)
    model.first.grad_dtype = torch.float32
    fully_shard(model, shard_placement_fn=lambda p: Shard(1))
    compiled(model, how)().backward()
    assert (model.first.grad.full_tensor() == 257).all()


@either_way
def test_uses_of_a_weight_that_is_sharded_by_columns_are_cast_before_they_are_summed(
    run_ranks, how
):
    run_ranks(2, _used_twice, how)


@needs_a_job
def test_a_mesh_of_two_dimensions_needs_no_names():
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1)))
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.placements == (Replicate(), Shard(0))
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(2, 2))


# ---- parameters that are DTensors already


def data_and_tensor_parallel():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tensor_parallel(model, mesh):
    """The Stack ``model``, its second block with sequences that are sharded too."""
    first, second = model.blocks
    parallelize_module(first, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(second, mesh, plan)
    part = {"input_layouts": Replicate(), "desired_input_layouts": Shard(0)}
    parallelize_module(second, mesh, PrepareModuleInput(**part, use_local_output=True))
    whole = {"output_layouts": Shard(0), "desired_output_layouts": Replicate()}
    parallelize_module(second, mesh, PrepareModuleOutput(**whole))
    return model


def sharded_by(shard, model, **kwargs):
    """``model``, its blocks and itself sharded by ``shard``."""
    for block in model.blocks:
        shard(block, **kwargs)
    return shard(model, **kwargs)


def _tensor_parallel(how):
    mesh = data_and_tensor_parallel()
    reference = Stack()
    model, theirs = (
        sharded_by(shard, tensor_parallel(copy.deepcopy(reference), mesh["tp"]), mesh=mesh["dp"])
        for shard in (fully_shard, torch_fully_shard)
    )
    pairs = zip(model.named_parameters(), theirs.parameters(), strict=True)
    for (fqn, ours), expected in pairs:
        assert ours.placements == expected.placements, fqn
        assert ours.device_mesh == expected.device_mesh, fqn
        assert torch.equal(ours.to_local(), expected.to_local()), fqn
    run = compiled(model, how, fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for seed in range(3):
        assert_same_step(
            model,
            reference,
            batch_of(8, 8, seed=seed),
            run=run,
            optimizers=optimizers,
            group=mesh.get_group("dp"),
        )


@each_way
def test_tensor_parallel_blocks_train_as_one_process(run_ranks, how):
    run_ranks(4, _tensor_parallel, how)


def _other_dimension_than_tensor_parallel():
    mesh = data_and_tensor_parallel()
    reference = Stack()
    model, theirs = (
        sharded_by(
            shard,
            tensor_parallel(copy.deepcopy(reference), mesh["tp"]),
            mesh=mesh["dp"],
            shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1),
        )
        for shard in (fully_shard, torch_fully_shard)
    )
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        assert ours.placements == expected.placements
    optimizers = optimizers_of(model, reference)
    group = mesh.get_group("dp")
    for seed in range(2):
        batch = batch_of(8, 8, seed=seed)
        assert_same_step(model, reference, batch, optimizers=optimizers, group=group)


def test_tensor_parallel_weights_may_be_sharded_by_columns(run_ranks):
    run_ranks(4, _other_dimension_than_tensor_parallel)


def _low_precision_tensor_parallel(how):
    mesh = data_and_tensor_parallel()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole = Stack()
    model, theirs = (
        sharded_by(
            shard,
            tensor_parallel(copy.deepcopy(whole), mesh["tp"]),
            mesh=mesh["dp"],
            mp_policy=policy,
        )
        for shard in (fully_shard, torch_fully_shard)
    )
    rows = mine(batch_of(8, 8), mesh.get_group("dp"))
    for run in (compiled(model, how), theirs):
        output = run(rows)
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
    for (fqn, ours), expected in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert ours.grad.dtype == expected.grad.dtype, fqn
        local = ours.grad.to_local()
        assert relative_difference(local, expected.grad.to_local()) <= 1e-2, fqn


@either_way
def test_tensor_parallel_blocks_compute_in_low_precision_as_in_fsdp2(run_ranks, how):
    run_ranks(4, _low_precision_tensor_parallel, how)


def _gathered_of_tensor_parallel(reshard_after_forward):
    """How often each weight is gathered, and bytes that are gathered between forward and backward,
    by those of the model.
    """
    mesh = data_and_tensor_parallel()
    model = tensor_parallel(Stack(width=256), mesh["tp"])
    sharded_by(
        fully_shard,
        model,
        mesh=mesh["dp"],
        reshard_after_forward=reshard_after_forward,
        transport="c10d",
    )
    weights = {n: p for n, p in model.named_parameters() if p.dim() > 1}
    before = buffer_stats().in_use
    with record_collectives() as log:
        loss = mean_square(model, batch_of(4, 256))
        kept = buffer_stats().in_use - before
        loss.backward()
    gathered = [fqn for c in log if c.op == "all_gather" for fqn in c.params]
    local = sum(2 * p.to_local().nbytes for p in weights.values())
    return {gathered.count(name) for name in weights}, kept / local


def test_what_autograd_saves_of_a_dtensor_is_gathered_again(run_ranks):
    assert run_ranks(4, _gathered_of_tensor_parallel, True) == 4 * [({2}, 0)]
    assert run_ranks(4, _gathered_of_tensor_parallel, False) == 4 * [({1}, 1)]


LLAMA = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def _llama(how):
    mesh = data_and_tensor_parallel()
    task = transformer_models.llama()
    model, reference = task.model, copy.deepcopy(task.model)
    for block in task.blocks:
        parallelize_module(block, mesh["tp"], LLAMA)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    run = compiled(model, how, fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    group = mesh.get_group("dp")
    for seed in range(3):
        batch = task.batch(4, seed=seed)
        loss = run(**{name: mine(rows, group) for name, rows in batch.items()}).loss
        loss.backward()
        whole = reference(**batch).loss
        whole.backward()
        assert mean_of(loss, group) == pytest.approx(whole.item(), rel=1e-5)
        assert_same_gradients(model, reference)
        step(optimizers)
    assert_same_parameters(model, reference)


@either_way
def test_a_tensor_parallel_llama_trains_as_one_process(run_ranks, how):
    run_ranks(4, _llama, how)


def _deposited():
    mesh = data_and_tensor_parallel()
    model = tensor_parallel(Stack(), mesh["tp"])
    sharded_by(fully_shard, model, mesh=mesh["dp"])
    weight = model.blocks[0].up.weight
    full = batch_of(16, 8, seed=mesh["dp"].get_local_rank())
    grad = DTensor.from_local(full, mesh["tp"], [Replicate()], run_check=False)
    with defer_reduction(model):
        with pytest.raises(
            Zero3Error, match=r"'blocks\.0\.up\.weight' is a Tensor: .*DTensor over"
        ):
            deposit_grad(weight, full)
        deposit_grad(weight, grad)
    expected = (batch_of(16, 8, seed=0) + batch_of(16, 8, seed=1)) / 2
    torch.testing.assert_close(weight.grad.full_tensor(), expected)


def test_a_gradient_of_a_dtensor_is_deposited_as_one(run_ranks):
    run_ranks(4, _deposited)


# ---- checkpoints


def _of_kind(kind, seed):
    torch.manual_seed(seed)
    model = Stack()
    if kind == "replicas":
        sharded_by(fully_shard, model, mesh=replicas())
    else:
        mesh = data_and_tensor_parallel()
        tensor_parallel(model, mesh["tp"])
        shard = torch_fully_shard if kind == "fsdp2" else fully_shard
        sharded_by(shard, model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def _values(model, optimizer):
    """Every parameter and moment, whole, by name."""
    values = {}
    for fqn, parameter in model.named_parameters():
        for key, tensor in (("", parameter), *sorted(optimizer.state[parameter].items())):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            values[fqn, key] = whole.detach().clone()
    return values


def _state(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _saved_and_loaded(kind, others, folder):
    model, optimizer = _of_kind(kind, seed=0)
    for seed in range(2):
        mean_square(model, batch_of(4, 8, seed=seed)).backward()
        step([optimizer])
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    saved = _values(model, optimizer)
    for other in others:
        model, optimizer = _of_kind(other, seed=1)
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        loaded = _values(model, optimizer)
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), (other, name)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("tensor parallel", ["tensor parallel", "fsdp2", "replicas"]),
        ("fsdp2", ["tensor parallel"]),
        ("replicas", ["replicas", "fsdp2"]),
    ],
    ids=["tensor parallel", "fsdp2", "replicas"],
)
def test_a_checkpoint_is_loaded_on_another_mesh(run_ranks, tmp_path, kind, others):
    run_ranks(4, _saved_and_loaded, kind, others, str(tmp_path))


# ---- shard_placement_fn


PLACEMENTS = {  # by shape; None for the biases
    (16, 8): Shard(1),
    (6, 16): None,
    (4, 6): Shard(-1),  # two ranks have two of six, one has none
    (5, 1, 2, 2): Shard(3),
}


def _placed(how, number):
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 4)]
    model = nn.Sequential(*layers, nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 5, 2), nn.Flatten())
    model, reference = shard(
        model,
        mesh=None if number is None else replicas(number),
        shard_placement_fn=lambda parameter: PLACEMENTS.get(tuple(parameter.shape)),
    )
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    ranks = dist.get_world_size() // (number or 1)
    for name, whole in reference.named_parameters():
        assert torch.equal(state[name], whole), name
        placement = PLACEMENTS.get(tuple(whole.shape)) or Shard(0)
        dim = placement.dim % whole.dim()
        parameter = model.get_parameter(name)
        assert parameter.placements[-1] == Shard(dim), name
        assert parameter.stride() == whole.stride(), name
        chunks = [*whole.chunk(ranks, dim), *[whole.narrow(dim, 0, 0)] * ranks]
        assert torch.equal(parameter.to_local(), chunks[dist.get_rank() % ranks]), name
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(8, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("interpreted", None),
        ("eager", None),
        ("interpreted", 2),
        ("eager", 2),
        pytest.param("zero3", None, marks=INDUCTOR_TOO),
    ],
)
def test_any_dimension_may_be_sharded(run_ranks, how, number):
    run_ranks(4, _placed, how, number)


@needs_a_job
@pytest.mark.parametrize(
    ("placement", "error", "message"),
    [
        (Shard(2), ValueError, r"Shard\(dim=2\)|S\(2\)"),
        (Shard(-3), ValueError, r"Shard\(dim=-3\)|S\(-3\)"),
        (Replicate(), TypeError, r"Replicate\(\)|R"),
        (1, TypeError, "1"),
    ],
    ids=str,
)
def test_what_is_no_dimension_of_a_parameter_is_refused(placement, error, message):
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(error, match=f"shard_placement_fn gave ({message}) for '0.weight'"):
        fully_shard(model, shard_placement_fn=lambda parameter: placement)
    assert type(model[0]) is nn.Linear
    assert type(fully_shard(model)[0].weight) is not nn.Parameter


# ---- a group of several modules


class Headed(nn.Module):
    """Raises before its head, or leaves the norm out, if it is told to."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x, norms=True, fails=False):
        x = self.body(x)
        if norms:
            x = self.norm(x)
        if fails:
            raise KeyError("as asked for")
        return self.head(x)


GROUP = ["head.bias", "head.weight", "norm.bias", "norm.weight"]


def gathered_in(log):
    """By gather, what it gathers."""
    return [sorted(c.params) for c in log if c.op == "all_gather"]


def _headed(how):
    model = Headed()
    reference = copy.deepcopy(model)
    modules = [model.norm, model.head]
    assert fully_shard(modules) is modules
    fully_shard(model)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    run = compiled(model, how, fullgraph=True)
    optimizers = optimizers_of(model, reference)
    with capture_graphs() as graphs:
        for seed in range(2):
            batch = batch_of(8, 8, seed=seed)
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    if how != "eager":
        assert (len(graphs.forward), len(graphs.backward)) == (1, 1)
        return

    with record_collectives() as log:
        loss = mean_square(model, mine(batch))
        assert gathered_in(log) == [["body.bias", "body.weight"], GROUP]
        assert held(model) == []
        loss.backward()
        # By messages ranks meet in a backward too, and each might need something else of it.
        meet = parameters_of(model.norm)["weight"].ranks_meet_in_backward
        assert gathered_in(log)[2:] == [[p for p in GROUP if meet or p != "head.bias"]]
    model.zero_grad()

    with record_collectives() as log:
        model(mine(batch), norms=False).square().mean().backward()
        assert gathered_in(log)[1] == GROUP
        assert held(model) == []
    assert model.norm.weight.grad is None
    reference(batch, norms=False).square().mean().backward()
    assert_same_gradients(model, reference)

    with pytest.raises(KeyError):
        model(mine(batch), fails=True)
    assert held(model) == []
    optimizers[0].zero_grad()
    optimizers[1].zero_grad()
    assert_same_step(model, reference, batch)

    model.norm.unshard()
    assert sorted(held(model)) == GROUP
    torch.testing.assert_close(model.head.weight, reference.head.weight)
    model.head.reshard()
    assert held(model) == []


@each_way
def test_several_modules_are_one_group(run_ranks, how):
    run_ranks(4, _headed, how)


def _alone(how):
    norm, head = nn.LayerNorm(8), nn.Linear(8, 4)
    both = nn.ModuleList([norm, head])
    reference = copy.deepcopy(both)
    fully_shard([norm, head])
    fqns = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [p.fqn for m in both for p in parameters_of(m).values()] == fqns
    norms, heads = compiled(norm, how), compiled(head, how)
    batch = batch_of(8, 8)
    for run, whole in zip((norms, heads), reference, strict=True):
        with record_collectives() as log:
            output = run(mine(batch))
            if how == "eager":
                assert gathered_in(log) == [sorted(fqns)]
        assert held(both) == []
        output.square().mean().backward()
        mean_square(whole, batch).backward()
        assert_same_gradients(both, reference)
        assert held(both) == []
    heads(norms(mine(batch))).square().mean().backward()
    reference[1](reference[0](batch)).square().mean().backward()
    assert_same_gradients(both, reference)
    assert held(both) == []


@either_way
def test_modules_of_a_group_run_alone_too(run_ranks, how):
    run_ranks(4, _alone, how)


@needs_a_job
def test_a_module_inside_of_another_of_its_list_belongs_to_that():
    block, head = Block(8), nn.Linear(8, 8)
    fully_shard([block.up, block, head, block])
    assert isinstance(block, Zero3Module)
    assert isinstance(head, Zero3Module)
    assert not isinstance(block.up, Zero3Module)
    with record_collectives() as log:
        head(block(torch.ones(2, 8))).sum().backward()
    reduced = [fqn for c in log if c.op == "reduce_scatter" for fqn in c.params]
    assert len(reduced) == len(set(reduced)) == 8
    assert all(p.grad is not None for m in (block, head) for p in m.parameters())


@needs_a_job
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (list, ValueError, "empty list"),
        (lambda: [nn.Linear(2, 2), 3], TypeError, "a list with 3"),
        (lambda: [nn.Linear(2, 2), nn.ModuleList()], Zero3Error, "a ModuleList has no forward"),
        (lambda: [fully_shard(nn.Linear(2, 2))], Zero3Error, "twice on the same Zero3Linear"),
    ],
    ids=["empty", "no module", "a container", "sharded already"],
)
def test_a_list_that_is_no_group_is_refused(build, error, message):
    modules = build()
    classes = [type(module) for module in modules]
    with pytest.raises(error, match=message):
        fully_shard(modules)
    assert [type(module) for module in modules] == classes


class Seeing(nn.Linear):
    """Keeps the dtypes that it computes with."""

    def forward(self, x):
        self.seen = x.dtype, self.weight.dtype
        return super().forward(x)


@needs_a_job
@either_way
def test_each_module_of_a_group_casts_what_it_takes_and_gives(how):
    low = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=low, output_dtype=torch.float64)
    first, second = model = nn.Sequential(Seeing(8, 8), Seeing(8, 8))
    fully_shard([first, second], mp_policy=policy)
    output = compiled(fully_shard(model), how)(torch.ones(2, 8))
    assert output.dtype == torch.float64
    assert first.seen == second.seen == (low, low)


# ---- what cannot be combined


@needs_a_job
def test_what_is_no_mesh_is_refused():
    with pytest.raises(
        TypeError, match=r"mesh is a DeviceMesh, got .*ProcessGroup.*; .*DeviceMesh\.from_group"
    ):
        fully_shard(nn.Linear(2, 2), mesh=dist.group.WORLD)


@needs_a_job
def test_what_torchs_fully_shard_has_sharded_is_refused():
    model = nn.Sequential(torch_fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))))
    with pytest.raises(Zero3Error, match=r"'0' \(FSDPLinear\) was sharded by torch's fully_shard"):
        fully_shard(model)


@needs_a_job
def test_a_mesh_of_three_dimensions_is_refused():
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"mesh of one or two dimensions.*slice"):
        fully_shard(model, mesh=mesh)
    assert type(model) is nn.Linear


def with_weight(mesh, placement):
    """A layer in a model; its weight is a DTensor."""
    model = nn.Sequential(nn.Linear(2, 2))
    weight = DTensor.from_local(torch.ones(2, 2), mesh, [placement])
    model[0].weight = nn.Parameter(weight)
    return model


@needs_a_job
def test_a_sum_that_is_still_to_be_reduced_is_no_parameter():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = with_weight(mesh["tp"], Partial())
    with pytest.raises(Zero3Error, match=r"'0\.weight' is a DTensor by \(Partial.*redistribute"):
        fully_shard(model, mesh=mesh["dp"])
    assert type(model[0]) is nn.Linear


@needs_a_job
@pytest.mark.parametrize("names", [None, ("tp",)], ids=["unnamed", "named"])
def test_meshes_that_are_not_of_one_mesh_are_refused(names):
    model = with_weight(init_device_mesh("cpu", (1,), mesh_dim_names=names), Shard(0))
    with pytest.raises(
        Zero3Error, match=r"'0\.weight' is a DTensor over .*pass mesh= of the other"
    ):
        fully_shard(model)
    assert type(model[0]) is nn.Linear


def _overlapping():
    model = Stack()
    mesh = data_and_tensor_parallel()
    tensor_parallel(model, mesh["tp"])
    for other in (None, mesh["tp"], mesh):
        with pytest.raises(Zero3Error, match=r"'up\.weight' is a DTensor over .*pass mesh= of"):
            fully_shard(model.blocks[0], mesh=other)
    sharded_by(fully_shard, model, mesh=mesh["dp"])


def test_a_mesh_that_tensor_parallelism_uses_too_is_refused(run_ranks):
    run_ranks(4, _overlapping)


@needs_a_job
def test_offloading_to_the_cpu_changes_nothing_there():
    model = fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy())
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(2, 2))
