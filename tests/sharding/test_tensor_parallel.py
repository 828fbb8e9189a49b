"""Parameters that are DTensors already, and shards of other dimensions, beside FSDP2."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import transformer_models
from support.mesh_models import (
    assert_same_step,
    data_and_tensor_parallel,
    either_way,
    mean_of,
    replicas,
    sharded_by,
    tensor_parallel,
)
from support.models import (
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
    step,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deepcompile_zero3 import (
    Zero3Error,
    buffer_stats,
    defer_reduction,
    deposit_grad,
    fully_shard,
    record_collectives,
)

# ---- parameters that are DTensors already


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


@pytest.mark.first(how="interpreted")
@either_way
def test_tensor_parallel_blocks_compute_in_low_precision_as_in_fsdp2(run_ranks, how):
    run_ranks(4, _low_precision_tensor_parallel, how)


def _gathered_of_tensor_parallel(reshard_after_forward):
    """Returns how often each weight is gathered, and the bytes gathered between forward and
    backward as a fraction of the model's.
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


def test_saved_parts_of_a_dtensor_are_gathered_again(run_ranks):
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


@pytest.mark.first(how="eager")
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
    """Returns every parameter and moment, unsharded, by name."""
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
        pytest.param("fsdp2", ["tensor parallel"], marks=pytest.mark.more),
        ("replicas", ["replicas", "fsdp2"]),
    ],
    ids=["tensor parallel", "fsdp2", "replicas"],
)
def test_a_checkpoint_is_loaded_on_another_mesh(run_ranks, tmp_path, kind, others):
    run_ranks(4, _saved_and_loaded, kind, others, str(tmp_path))
