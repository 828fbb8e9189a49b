"""Meshes that cannot be used, and groups of several modules."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.mesh_models import (
    assert_same_step,
    data_and_tensor_parallel,
    either_way,
    sharded_by,
    tensor_parallel,
)
from support.models import (
    Block,
    Stack,
    assert_same_gradients,
    batch_of,
    compiled,
    each_way,
    gathered_fqns,
    mean_square,
    mine,
    optimizers_of,
    step,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

from deepcompile_zero3 import (
    Zero3Error,
    Zero3Module,
    capture_graphs,
    fully_shard,
    record_collectives,
)
from deepcompile_zero3.sharding.module_parameters import parameters_of
from deepcompile_zero3.sharding.setup import arguments

# ---- a group of several modules


class Headed(nn.Module):
    """A stack that raises before its head, or skips the norm, on request."""

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
    """Returns the parameters of each gather."""
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
        assert gathered_fqns(model) == []
        loss.backward()
        # Ranks with messages also meet in a backward, in which each may need other parameters.
        meet = parameters_of(model.norm)["weight"].ranks_meet_in_backward
        assert gathered_in(log)[2:] == [[p for p in GROUP if meet or p != "head.bias"]]
    model.zero_grad()

    with record_collectives() as log:
        model(mine(batch), norms=False).square().mean().backward()
        assert gathered_in(log)[1] == GROUP
        assert gathered_fqns(model) == []
    assert model.norm.weight.grad is None
    reference(batch, norms=False).square().mean().backward()
    assert_same_gradients(model, reference)

    with pytest.raises(KeyError):
        model(mine(batch), fails=True)
    assert gathered_fqns(model) == []
    optimizers[0].zero_grad()
    optimizers[1].zero_grad()
    assert_same_step(model, reference, batch)

    model.norm.unshard()
    assert sorted(gathered_fqns(model)) == GROUP
    torch.testing.assert_close(model.head.weight, reference.head.weight)
    model.head.reshard()
    assert gathered_fqns(model) == []


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
        assert gathered_fqns(both) == []
        output.square().mean().backward()
        mean_square(whole, batch).backward()
        assert_same_gradients(both, reference)
        assert gathered_fqns(both) == []
    heads(norms(mine(batch))).square().mean().backward()
    reference[1](reference[0](batch)).square().mean().backward()
    assert_same_gradients(both, reference)
    assert gathered_fqns(both) == []


@pytest.mark.first(how="eager")
@either_way
def test_modules_of_a_group_run_alone_too(run_ranks, how):
    run_ranks(4, _alone, how)


class Chunked(nn.Module):
    """A model whose head only its loss calls, once for each chunk of what the forward returns."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.norm(self.body(x))


def _chunked(how):
    model = Chunked()
    reference = copy.deepcopy(model)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    optimizers = optimizers_of(model, reference)
    ours = compiled(model, how), compiled(model.head, how), mine
    plain = reference, reference.head, lambda batch: batch
    for seed in range(4):
        for run, head, part in (ours, plain):
            x = part(batch_of(8, 8, seed=seed))
            hidden = run(x)
            chunks = hidden.detach().requires_grad_() if seed % 2 else hidden
            losses = (head(chunk).square().sum() / len(x) for chunk in chunks.chunk(2))
            if seed % 2:  # a backward for each chunk
                for loss in losses:
                    loss.backward()
                hidden.backward(chunks.grad)
            else:
                sum(losses).backward()
        assert gathered_fqns(model) == []
        assert_same_gradients(model, reference)
        step(optimizers)


@each_way
def test_a_forward_may_run_a_part_of_a_group_and_a_loss_the_rest_in_chunks(run_ranks, how):
    run_ranks(2, _chunked, how)


@needs_a_job
def test_a_group_is_gathered_once_for_each_time_that_all_of_its_modules_run():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, second, first, second, first, second)
    fully_shard([first, second], reshard_after_forward=True)
    fully_shard(model)
    with record_collectives() as log:
        model(torch.ones(2, 8))
    gathered = [set(c.params) for c in log if c.op == "all_gather"]
    assert gathered == [{"0.weight", "0.bias", "1.weight", "1.bias"}] * 3


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
        (lambda: [fully_shard(nn.Linear(2, 2))], Zero3Error, "twice on the same Linear"),
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
    """A layer that records the dtypes that it computes with."""

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
def test_objects_that_are_no_mesh_are_refused():
    with pytest.raises(
        TypeError,
        match=r"mesh must be a DeviceMesh, got .*ProcessGroup.*DeviceMesh\.from_group",
    ):
        fully_shard(nn.Linear(2, 2), mesh=dist.group.WORLD)


@needs_a_job
def test_modules_sharded_by_torchs_fully_shard_are_refused():
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
    """Returns a model with a layer whose weight is a DTensor."""
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


@needs_a_job
def test_blocks_share_a_mesh_over_gloo_on_accelerators(monkeypatch):
    made = []

    def make(*mesh):
        made.append(mesh)
        return init_device_mesh("cpu", (1,))

    monkeypatch.setattr(arguments, "_default_meshes", {})
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(arguments, "init_device_mesh", make)
    assert arguments.default_mesh() is arguments.default_mesh()
    assert made == [("cuda", (1,))]
