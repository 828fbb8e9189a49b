"""A digest depends on the values of full tensors, and on nothing else."""

import pytest
import torch
import torch.distributed as dist
from support.models import Stack, batch_of, mean_square
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deepcompile_zero3 import (
    FileOffloadPolicy,
    MatrixOwners,
    fully_shard,
    step_locally,
    training_digest,
)


class Odd(nn.Module):
    """Parameters of many shapes and dtypes, whose sizes no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.vector = nn.Parameter(torch.randn(7))
        self.wide = nn.Parameter(torch.randn(3, 301).bfloat16())
        self.cube = nn.Parameter(torch.randn(5, 3, 2, dtype=torch.float64))
        self.mask = nn.Parameter(torch.randn(9, 2) > 0, requires_grad=False)
        self.codes = nn.Parameter(torch.randint(2**62, (6, 300)), requires_grad=False)

    def forward(self):
        raise NotImplementedError  # gradients are given


def _stepped(model):
    """Returns the digest of a model after a step, whose gradients are not computed in a forward.

    No rounding of sums over ranks can make two layouts differ.
    """
    torch.manual_seed(1)
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad and number != 1:  # one has no gradient
            grad = torch.randn(parameter.shape, device="cpu").to(parameter.dtype)
            if isinstance(parameter, DTensor):
                grad = _distributed_like(grad, parameter)
            parameter.grad = grad
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    optimizer.step()
    return training_digest(model, optimizer)


def _distributed_like(full, parameter):
    """Returns ``full`` with the layout of ``parameter``, whichever class its mesh asks for."""
    like = parameter.detach().clone()
    local = like.to_local()
    if local.is_meta:  # another rank owns it
        return like
    mine = distribute_tensor(
        full, parameter.device_mesh, [*parameter.placements], src_data_rank=None
    )
    local.copy_(mine.to_local())
    return like


def _odd(mesh=None, **kwargs):
    torch.manual_seed(0)
    model = Odd()
    if mesh != "whole":
        fully_shard(model, mesh=None if mesh is None else init_device_mesh("cpu", mesh), **kwargs)
    return _stepped(model)


def _columns(parameter):
    return Shard(1) if parameter.dim() > 1 else None


def _odd_by_columns():
    return _odd(shard_placement_fn=_columns)


def test_ranks_meshes_and_placements_do_not_change_it(run_ranks):
    whole = run_ranks(1, _odd, "whole")[0]
    for world_size, layout in (
        (1, (_odd,)),
        (2, (_odd,)),
        (2, (_odd_by_columns,)),
        (2, (_odd, (2, 1))),  # replicas
    ):
        for digest in run_ranks(world_size, *layout):
            assert digest == whole


@pytest.mark.more
def test_four_ranks_and_replicas_do_not_change_it(run_ranks):
    whole = run_ranks(1, _odd, "whole")[0]
    for layout in ((_odd,), (_odd_by_columns,), (_odd, (2, 2))):
        for digest in run_ranks(4, *layout):
            assert digest == whole


def _rows_over_both(name, module, mesh):
    for key, parameter in [*module.named_parameters(recurse=False)]:
        rows = distribute_tensor(parameter, mesh, [Shard(0), Shard(0)])
        module.register_parameter(key, nn.Parameter(rows))


def _matrices(layout, folder=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5, bias=False))
    match layout:
        case "owned":
            fully_shard(model, shard_placement_fn=MatrixOwners(model))
        case "tensor parallel":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            fully_shard(model, mesh=mesh["dp"])
        case "over both":  # as DTensor divides: the left dimension of the mesh first
            mesh = init_device_mesh("cpu", (2, 2))
            distribute_module(model, mesh, _rows_over_both)
        case "offloaded":
            fully_shard(model, offload_policy=FileOffloadPolicy(folder))
    return _stepped(model)


def test_owners_do_not_change_it(run_ranks):
    whole = run_ranks(1, _matrices, "whole")[0]
    assert run_ranks(2, _matrices, "owned") == [whole] * 2


def test_a_file_does_not_change_it(run_ranks, tmp_path):
    whole = run_ranks(1, _matrices, "whole")[0]
    assert run_ranks(2, _matrices, "offloaded", tmp_path) == [whole] * 2


@pytest.mark.parametrize("layout", ["tensor parallel", "over both"])
def test_rows_divided_over_two_mesh_dimensions_do_not_change_it(run_ranks, layout):
    # 9 rows: either order of the dimensions gives ranks as many rows, of other places.
    whole = run_ranks(1, _matrices, "whole")[0]
    assert run_ranks(4, _matrices, layout) == [whole] * 4


def _step_locally(locally):
    torch.manual_seed(0)
    model = Stack()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if locally:
        step_locally(optimizer)
    mean_square(model, batch_of(4, 8)).backward()
    optimizer.step()
    return training_digest(model, optimizer)


def test_states_that_are_local_tensors_count_as_shards(run_ranks):
    assert run_ranks(2, _step_locally, True) == run_ranks(2, _step_locally, False)


def _flipped(where, rank):
    """Returns the names whose digests change with the lowest bit of an element of one rank."""
    torch.manual_seed(0)
    model = Stack()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    mean_square(model, batch_of(4, 8)).backward()
    optimizer.step()
    before = training_digest(model, optimizer)
    parameter = model.blocks[1].up.weight
    changed = {
        "shards": parameter.detach(),
        "gradients": parameter.grad,
        "states": optimizer.state[parameter]["exp_avg_sq"],
    }[where]
    if dist.get_rank() == rank:
        changed.to_local().view(torch.int32)[-1, -1] ^= 1
    after = training_digest(model, optimizer)
    assert training_digest(model, optimizer) == after
    return [
        (kind, fqn)
        for kind in ("shards", "gradients", "states")
        for fqn, value in getattr(before, kind).items()
        if getattr(after, kind)[fqn] != value
    ]


@pytest.mark.parametrize("where", ["shards", "gradients", "states"])
def test_one_bit_of_one_rank_changes_the_digest_of_its_tensor(run_ranks, where):
    assert run_ranks(2, _flipped, where, 1) == [[(where, "blocks.1.up.weight")]] * 2


def _plain(rank):
    """Returns digests of a model that is not sharded, before and after one rank changes it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    before = training_digest(model)
    if dist.get_rank() == rank:
        model.bias.data[0] += 1
    return before, training_digest(model)


def test_plain_tensors_count_once_unless_ranks_differ(run_ranks):
    ((alone, _),) = run_ranks(1, _plain, -1)
    for before, after in run_ranks(2, _plain, 1):
        assert before == alone
        assert after.shards["weight"] == alone.shards["weight"]
        assert after.shards["bias"] != alone.shards["bias"]


def _differ(change):
    values = torch.arange(600, dtype=torch.float32).view(2, 300)
    model = nn.Module()
    model.w = nn.Parameter(values.clone())
    before = training_digest(model)
    model.w = nn.Parameter(change(values))
    return before != training_digest(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.flip(1),
        lambda w: w.flip(0),
        lambda w: -w,
        lambda w: w.bfloat16(),
        lambda w: w.view(300, 2),
        lambda w: w.double(),
        lambda w: w.masked_fill(w == 0, -0.0),
    ],
    ids=["columns", "rows", "signs", "dtype", "shape", "width", "zero"],
)
def test_places_signs_dtypes_and_shapes_count(change):
    assert _differ(change)
    assert not _differ(torch.clone)


def test_signs_of_doubles_count():
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    before = training_digest(model)
    with torch.no_grad():
        model.w[:2].neg_()  # an even number of the highest bits
    assert training_digest(model) != before


def test_rows_and_columns_have_other_keys():
    weight = torch.arange(300.0 * 300).view(300, 300)
    one, other = (nn.ParameterDict({"w": nn.Parameter(w)}) for w in (weight, weight.t().clone()))
    assert training_digest(one).shards != training_digest(other).shards


def test_parameters_outside_of_the_model_have_the_number_of_their_optimizer():
    lone = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([each], momentum=0.9) for each in lone]
    for each, optimizer in zip(lone, optimizers, strict=True):
        each.grad = torch.ones(2)
        optimizer.step()
    states = training_digest(nn.Linear(1, 1), optimizers).states
    assert [*states] == ["optimizers.0.param_groups.0.0", "optimizers.1.param_groups.0.0"]


def test_a_long_vector_is_digested_in_pieces():
    values = torch.arange(200_000, dtype=torch.int32)
    model = nn.Module()
    model.w = nn.Parameter(values, requires_grad=False)
    before = training_digest(model)
    values[-1] += 1
    assert training_digest(model) != before


def test_a_compiled_model_has_the_names_of_the_model():
    model = nn.Linear(2, 2)
    assert training_digest(torch.compile(model)) == training_digest(model)


def test_other_arguments_are_refused():
    with pytest.raises(TypeError, match="model must be a module, got dict"):
        training_digest({})
    with pytest.raises(TypeError, match="optimizer must be an optimizer, got int"):
        training_digest(nn.Linear(2, 2), 1)
