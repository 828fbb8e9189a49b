"""States of optimizers that differ between ranks: stepped, saved and loaded."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.job import needs_a_job
from support.matrix_optimizers import Blockwise, Shampoo, Soap
from support.mesh_models import replicas
from support.models import Stack, batch_of, mean_square, mine, shard
from support.owned_models import owned
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from deepcompile_zero3 import Zero3Error, fully_shard, step_locally


def _adafactor(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=True)


def _bitsandbytes(parameters):
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=0.01, min_8bit_size=32)


MATRIX_OPTIMIZERS = {"shampoo": Shampoo, "soap": Soap, "adafactor": _adafactor}
OPTIONS = {
    "sharded": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
}
FULL = StateDictOptions(full_state_dict=True)
LOAD_FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _give_gradients(model, seed):
    """Gives parameters gradients that all numbers of ranks have."""
    for i, parameter in enumerate(model.parameters()):
        gradient = batch_of(*parameter.shape, seed=10 * seed + i)
        if isinstance(parameter, DTensor) and parameter.device_mesh.get_coordinate() is None:
            parameter.grad = torch.zeros_like(parameter)
        elif isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements
            )
        else:
            parameter.grad = gradient


def _steps(model, optimizer, seeds):
    for seed in seeds:
        _give_gradients(model, seed)
        optimizer.step()
        optimizer.zero_grad()


# ---- parameters with an owner


def _of_owners(name, seed):
    torch.manual_seed(seed)
    model, reference, owners = owned(Stack())
    make = MATRIX_OPTIMIZERS[name]
    ours, theirs = (
        make([p for n, p in m.named_parameters() if n in owners.rank_of])
        for m in (model, reference)
    )
    step_locally(ours)
    return model, ours, reference, theirs


def _same_as_in_one_process(name):
    model, ours, reference, theirs = _of_owners(name, seed=0)
    _steps(model, ours, range(4))
    _steps(reference, theirs, range(4))
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), reference.get_parameter(key)), key
    full = get_optimizer_state_dict(model, ours, options=FULL)["state"]
    expected = get_optimizer_state_dict(reference, theirs)["state"]
    assert full.keys() == expected.keys()
    for key, state in expected.items():
        if "bases" in state:
            state["bases"] = {"as a tuple": list(state["bases"])}
        assert full[key].keys() == state.keys()
        for part, value in state.items():
            torch.testing.assert_close(full[key][part], value, rtol=0, atol=0, msg=f"{key} {part}")


@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_any_optimizer_of_matrices_steps_those_of_owners_as_in_one_process(run_ranks, name):
    run_ranks(2, _same_as_in_one_process, name)


def _goes_on(name, folder, is_saved):
    model, ours, *_ = _of_owners(name, seed=1 if is_saved else 2)
    if is_saved:
        _steps(model, ours, range(3))
    values, states = get_state_dict(model, ours)
    state = {"model": values, "optimizer": states}
    if is_saved:
        dcp.save(state, checkpoint_id=folder)
    else:
        if name == "soap":  # it makes states in its second step, which torch does not take
            _steps(model, ours, range(2))
            values, states = get_state_dict(model, ours)
            state = {"model": values, "optimizer": states}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, ours, model_state_dict=values, optim_state_dict=states)
    _steps(model, ours, [5])
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_states_of_owners_load_on_any_number_of_ranks(run_ranks, tmp_path, name):
    saved, _ = run_ranks(2, _goes_on, name, tmp_path, True)
    for world_size in (3,) if name == "shampoo" else (1,):
        for loaded in run_ranks(world_size, _goes_on, name, tmp_path, False):
            torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


def _without_elements():
    model, _, owners = owned(Stack())
    matrices = [p for n, p in model.named_parameters() if n in owners.rank_of]
    optimizer = Blockwise(matrices, table=0)
    step_locally(optimizer)
    _steps(model, optimizer, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    _steps(model, optimizer, [1])
    of_mine = [state["table"] for state in optimizer.state.values() if state]
    assert of_mine
    assert all(table.shape == (0,) for table in of_mine)


def test_a_state_without_elements_keeps_its_shape(run_ranks):
    run_ranks(2, _without_elements)


def _without_a_local_step(name):
    model, _, owners = owned(Stack())
    matrices = [p for n, p in model.named_parameters() if n in owners.rank_of]
    optimizer = MATRIX_OPTIMIZERS[name](matrices)
    _give_gradients(model, 0)
    with pytest.raises(Zero3Error, match=r"that one rank owns.* call .*step_locally\(optimizer\)"):
        optimizer.step()
    step_locally(optimizer)
    optimizer.state.clear()
    optimizer.step()
    assert get_optimizer_state_dict(model, optimizer, options=FULL)["state"]


@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_plain_states_beside_an_owned_matrix_lead_to_a_local_step(run_ranks, name):
    run_ranks(2, _without_a_local_step, name)


@needs_a_job
def test_an_optimizer_of_shards_and_matrices_is_refused_with_what_helps():
    model, _, owners = owned(Stack())
    with pytest.raises(ValueError, match=r"Shampoo may need more .*MatrixOwners"):
        step_locally(Shampoo(model.parameters()))
    step_locally(Shampoo([p for n, p in model.named_parameters() if n in owners.rank_of]))
    lbfgs = torch.optim.LBFGS([p for n, p in model.named_parameters() if n in owners.rank_of])
    with pytest.raises(ValueError, match="LBFGS may need more"):
        step_locally(lbfgs)


# ---- shards


SHARD_OPTIMIZERS = {"blockwise": Blockwise, "bitsandbytes": _bitsandbytes}


def _of_shards(name, seed, mesh=None):
    torch.manual_seed(seed)
    model, _ = shard(Stack(width=9, depth=1), mesh=mesh)  # uneven shards
    optimizer = SHARD_OPTIMIZERS[name](model.parameters())
    step_locally(optimizer, is_elementwise=True)
    return model, optimizer


def _locals(model, optimizer):
    return [
        (parameter.to_local().detach().clone(), copy.deepcopy(optimizer.state[parameter]))
        for parameter in model.parameters()
    ]


def _save(name, folder, options, mesh):
    model, optimizer = _of_shards(name, 1, mesh())
    _steps(model, optimizer, range(2))
    values, states = get_state_dict(model, optimizer, options=OPTIONS[options])
    dcp.save({"model": values, "optimizer": states}, checkpoint_id=folder)
    before = _locals(model, optimizer)
    _steps(model, optimizer, [7])
    return before, _locals(model, optimizer)


def _load(name, folder, options, mesh):
    model, optimizer = _of_shards(name, 2, mesh())
    values, states = get_state_dict(model, optimizer, options=OPTIONS[options])
    dcp.load({"model": values, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=values,
        optim_state_dict=states,
        options=OPTIONS[options],
    )
    loaded = _locals(model, optimizer)
    _steps(model, optimizer, [7])
    return loaded, _locals(model, optimizer)


def _one_mesh():
    return None


@pytest.mark.parametrize(
    ("name", "options", "world_size"),
    [
        ("blockwise", "flattened", 2),
        pytest.param("blockwise", "sharded", 4, marks=pytest.mark.more),
        ("bitsandbytes", "sharded", 2),
    ],
)
def test_states_of_any_shape_load_on_as_many_ranks(run_ranks, tmp_path, name, options, world_size):
    if name == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
    mesh = replicas if world_size == 4 else _one_mesh
    saved = run_ranks(world_size, _save, name, tmp_path, options, mesh)
    loaded = run_ranks(world_size, _load, name, tmp_path, options, mesh)
    for ours, theirs in zip(loaded, saved, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _load_elsewhere(folder):
    model, optimizer = _of_shards("blockwise", 2)
    values, states = get_state_dict(model, optimizer)
    before = copy.deepcopy(_locals(model, optimizer))
    told = r"optimizer.state.*(scales|largest|table)\.by rank: load on as many ranks"
    for planner in (None, dcp.DefaultLoadPlanner(allow_partial_load=True)):
        with pytest.raises(dcp.api.CheckpointException, match=told):
            dcp.load({"model": values, "optimizer": states}, checkpoint_id=folder, planner=planner)
    torch.testing.assert_close(_locals(model, optimizer), before, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.more)])
def test_states_of_ranks_are_refused_on_another_number(run_ranks, tmp_path, world_size):
    run_ranks(2, _save, "blockwise", tmp_path, "sharded", _one_mesh)
    run_ranks(world_size, _load_elsewhere, tmp_path)


def _full(path):
    model, optimizer = _of_shards("blockwise", 1)
    _steps(model, optimizer, range(2))
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        torch.save(full, path)
    before = _locals(model, optimizer)
    set_optimizer_state_dict(model, optimizer, full, options=FULL)
    torch.testing.assert_close(_locals(model, optimizer), before, rtol=0, atol=0)
    again, other = _of_shards("blockwise", 1)
    given = full if dist.get_rank() == 0 else {}
    set_optimizer_state_dict(again, other, given, options=LOAD_FULL)
    for (_, ours), (_, theirs) in zip(_locals(again, other), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(_locals(model, optimizer), before, rtol=0, atol=0)


def _full_elsewhere(path):
    model, optimizer = _of_shards("blockwise", 1)
    _steps(model, optimizer, range(2))
    before = _locals(model, optimizer)
    full = torch.load(path)
    with pytest.raises((RuntimeError, Zero3Error)):
        set_optimizer_state_dict(model, optimizer, full, options=LOAD_FULL)
    full["state"] = {i: state for i, state in enumerate(full["state"].values())}
    for group in full["param_groups"]:
        group["params"] = list(range(len(group["params"])))
    told = r"'?scales'? of .* saved by 2 ranks, .* loaded by 3: load it on as many ranks"
    with pytest.raises(Zero3Error, match=told):
        optimizer.load_state_dict(full)
    torch.testing.assert_close(_locals(model, optimizer), before, rtol=0, atol=0)


def test_full_state_dicts_have_the_states_of_all_ranks(run_ranks, tmp_path):
    path = tmp_path / "full.pt"
    run_ranks(2, _full, path)
    run_ranks(3, _full_elsewhere, path)


class _Table(nn.Module):
    """Parameters of which the shards of one have the shape of a table."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self):
        return sum(weight.sum() for weight in self.weights)


def _of_a_shape(shapes):
    model = fully_shard(_Table(shapes))
    optimizer = Blockwise(model.parameters(), table=16)
    step_locally(optimizer, is_elementwise=True)
    _steps(model, optimizer, [0])
    states = optimizer.state_dict()["state"]
    assert all(type(state["step"]) is torch.Tensor for state in states.values())
    return [{key: isinstance(each, DTensor) for key, each in s.items()} for s in states.values()]


def test_a_table_of_the_shape_of_a_shard_is_not_taken_for_a_part(run_ranks):
    for found in run_ranks(2, _of_a_shape, [[32], [8, 3]]):
        assert all(state["momentum"] and not state["table"] for state in found)
    for found in run_ranks(2, _of_a_shape, [[32]]):  # nothing tells them apart
        assert all(not state["momentum"] and not state["table"] for state in found)


class _WithNumbers(torch.optim.SGD):
    ranks_with_one = 1

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["rank"] = dist.get_rank() // self.ranks_with_one


def _numbers(mesh, ranks_with_one):
    model, _ = shard(Stack(), mesh=mesh())
    optimizer = _WithNumbers(model.parameters(), lr=0.1)
    optimizer.ranks_with_one = ranks_with_one
    step_locally(optimizer, is_elementwise=True)
    mean_square(model, mine(batch_of(8, 8))).backward()
    optimizer.step()
    told = r"state 'rank' of .* is 0 on one rank and 1 on another.*: keep it in a floating-point"
    with pytest.raises(Zero3Error, match=told):
        optimizer.state_dict()
    for state in optimizer.state.values():  # as the error says, in a name of torch's
        state["mu"] = torch.tensor(float(state.pop("rank")))
    told = r"'mu' of .* is 0.0 on one rank and 1.0 .*: give it another name, and keep it in a float"
    with pytest.raises(Zero3Error, match=told):
        optimizer.state_dict()
    for state in optimizer.state.values():
        state["rank"] = state.pop("mu")
    optimizer.state_dict()


def test_numbers_that_differ_between_ranks_are_refused(run_ranks):
    run_ranks(2, _numbers, _one_mesh, 1)


def test_numbers_that_differ_between_replicas_are_refused(run_ranks):
    run_ranks(4, _numbers, replicas, 2)
