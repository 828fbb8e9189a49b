"""Parameters that one rank owns: whole on that rank, gathered and reduced like any other."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from mesh_models import replicas
from models import (
    Stack,
    assert_same_parameters,
    batch_of,
    compiled,
    each_way,
    either_transport,
    for_all,
    mean_square,
    mine,
    relative_difference,
    shard,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from deepcompile_zero3 import (
    MatrixOwners,
    Owned,
    Zero3Error,
    clip_grad_norm_,
    defer_reduction,
    deposit_grad,
    explain,
    fully_shard,
    gradient_norms,
    record_collectives,
)

FULL = StateDictOptions(full_state_dict=True)


def _gradients(model):
    """Returns the full gradients by name, on all ranks, of the parameters that have one."""
    gradients = {}
    for name, parameter in model.named_parameters():
        mesh = parameter.device_mesh
        if not hasattr(mesh, "owner"):
            gradient = None if parameter.grad is None else parameter.grad.full_tensor()
        else:
            is_mine = mesh.get_coordinate() is not None
            assert is_mine or parameter.grad is None, name
            gradient = torch.full(parameter.shape, math.nan)
            if is_mine and parameter.grad is not None:
                assert parameter.grad.placements == parameter.placements
                gradient.copy_(parameter.grad.to_local())
            dist.broadcast(gradient, group=mesh.shard_group, group_src=mesh.owner)
            gradient = None if gradient.isnan().all() else gradient
        if gradient is not None:
            gradients[name] = gradient
    return gradients


def _assert_same_gradients(model, reference, tolerance=1e-5):
    gradients = _gradients(model)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert {*gradients} == {*expected}
    for name, gradient in gradients.items():
        assert relative_difference(gradient, expected[name]) <= tolerance, name


def _in_blocks(name, parameter):
    return parameter.dim() == 2 and name.startswith("blocks")


def _owned(model, mesh=None, **settings):
    """Returns ``model``, whose blocks' matrices have owners, an unsharded copy, and the owners."""
    owners = MatrixOwners(model, mesh, is_matrix=_in_blocks)
    model, reference = shard(model, model.blocks, mesh=mesh, shard_placement_fn=owners, **settings)
    return model, reference, owners


def _muon_and_adam(model, owners):
    matrices = [p for n, p in model.named_parameters() if n in owners.rank_of]
    others = [p for n, p in model.named_parameters() if n not in owners.rank_of]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)


def _step(model, optimizers, batch, run=None):
    mean_square(model if run is None else run, mine(batch)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# ---- training


def _steps_bit_for_bit(how, transport):
    model, reference, owners = _owned(Stack(depth=3), transport=transport)
    run = compiled(model, how, fullgraph=how != "eager")
    ours, theirs = _muon_and_adam(model, owners), _muon_and_adam(reference, owners)
    updated = []
    newton_schulz = torch.optim._muon._zeropower_via_newtonschulz

    def counted(grad, *args):
        updated.append(tuple(grad.shape))
        return newton_schulz(grad, *args)

    for seed in range(3):
        batch = batch_of(8, 8, seed=seed)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        _assert_same_gradients(model, reference, 1e-4 if seed else 1e-5)  # Muon amplifies rounding
        for name, gradient in _gradients(model).items():
            reference.get_parameter(name).grad.copy_(gradient)
        with CommDebugMode() as collectives, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", counted)
            for optimizer in ours:
                optimizer.step()
        assert collectives.get_total_counts() == 0
        for optimizer in theirs:
            optimizer.step()
        for optimizer in (*ours, *theirs):
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), reference.get_parameter(name)), name
    mine_only = [n for n, owner in owners.rank_of.items() if owner == dist.get_rank()]
    assert len(updated) == 3 * len(mine_only)
    return updated


@each_way
@either_transport
@pytest.mark.parametrize("world_size", [2, 4])
def test_each_matrix_is_updated_once_as_in_one_process(run_ranks, how, transport, world_size):
    updated = run_ranks(world_size, _steps_bit_for_bit, how, transport)
    assert sum(map(len, updated)) == 3 * 6


def _replicated(transport):
    model, reference, _ = _owned(Stack(), replicas(), transport=transport)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    owned = model.blocks[0].up.weight
    assert owned.device_mesh.shape == (2, 1)
    assert owned.placements == (Replicate(), Replicate())
    for micro in range(4):
        model.set_requires_all_reduce(micro % 2 == 1)
        batch = batch_of(8, 8, seed=micro)
        mean_square(model, mine(batch)).backward()
        mean_square(reference, batch).backward()
        if micro % 2:
            _assert_same_gradients(model, reference)
            norms = [clip(m.parameters(), 0.1) for clip, m in _clips(model, reference)]
            torch.testing.assert_close(*norms)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_parameters(model, reference)


def _clips(model, reference):
    return (clip_grad_norm_, model), (nn.utils.clip_grad_norm_, reference)


@either_transport
def test_replicas_of_an_owner_stay_equal(run_ranks, transport):
    run_ranks(4, _replicated, transport)


def _settings(how, transport, **settings):
    model, reference, _ = _owned(Stack(), transport=transport, **settings)
    run = compiled(model, how)
    for micro in range(3):
        model.set_requires_gradient_sync(micro > 0)
        batch = batch_of(8, 8, seed=micro)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
    _assert_same_gradients(model, reference)
    norms = gradient_norms(model)
    for name, parameter in reference.named_parameters():
        assert norms[name] == pytest.approx(parameter.grad.norm().item(), rel=1e-4)
    totals = [clip(m.parameters(), 0.1) for clip, m in _clips(model, reference)]
    torch.testing.assert_close(*totals)
    _assert_same_gradients(model, reference)
    model.zero_grad()
    reference.zero_grad()
    with defer_reduction(model):
        mean_square(run, mine(batch_of(8, 8))).backward()
        deposit_grad(model.blocks[0].up.weight, torch.full((16, 8), 1.0 + dist.get_rank()))
    mean_square(reference, batch_of(8, 8)).backward()
    reference.blocks[0].up.weight.grad += (1 + dist.get_world_size()) / 2
    _assert_same_gradients(model, reference)


@pytest.mark.parametrize("how", ["eager", "interpreted"])
@either_transport
@pytest.mark.parametrize("reshard_after_forward", [True, False, 2])
def test_owned_parameters_accumulate_defer_and_reshard(
    run_ranks, how, transport, reshard_after_forward
):
    if reshard_after_forward == 2 and transport == "shared_memory":
        pytest.skip("ranks that share memory keep one copy")
    settings = {"reshard_after_forward": reshard_after_forward}
    run_ranks(4, _run_with, _settings, how, transport, settings)


def _run_with(function, how, transport, settings):
    function(how, transport, **settings)


class _Tied(nn.Module):
    """Two layers of one weight, another with gaps in its memory, and one that few ranks use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.across = nn.Parameter(batch_of(6, 4).t())
        self.rare = nn.Linear(4, 4)

    def forward(self, x, uses_rare):
        x = torch.tanh(self.second(torch.tanh(self.first(x)))) @ self.across.t()
        return self.rare(x) if uses_rare else x


def _differ_in_use(how, transport):
    def on_last_rank(parameter):
        return Owned(2) if parameter.dim() == 2 else None

    model, reference = shard(_Tied(), shard_placement_fn=on_last_rank, transport=transport)
    assert model.first.weight is model.second.weight
    run = compiled(model, how)
    batch = batch_of(6, 6)
    # The graphs of all ranks use the same parameters. Eager code gathers those of a module.
    uses = [each == 0 or how != "eager" for each in range(3)]
    run(mine(batch), uses[dist.get_rank()]).square().mean().backward()
    for each, rows in zip(uses, batch.chunk(3), strict=True):
        (reference(rows, each).square().mean() / 3).backward()
    _assert_same_gradients(model, reference)


@each_way
@either_transport
def test_owned_parameters_may_be_tied_strided_and_missing(run_ranks, how, transport):
    run_ranks(3, _differ_in_use, how, transport)


def _low_precision(how, transport):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Stack(width=16)
    model.blocks[0].up.weight.grad_dtype = torch.bfloat16
    owners = MatrixOwners(model, is_matrix=_in_blocks)
    for block in model.blocks:
        fully_shard(block, shard_placement_fn=owners, mp_policy=policy, transport=transport)
    fully_shard(model, shard_placement_fn=owners, mp_policy=policy, transport=transport)
    with pytest.raises(Zero3Error, match="still on the meta device"):
        model(batch_of(2, 16))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    whole = Stack(width=16)
    whole.blocks[0].up.weight.grad_dtype = torch.bfloat16
    set_model_state_dict(
        model,
        whole.state_dict() if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name
    batch = batch_of(4, 16)
    mean_square(compiled(model, how), mine(batch)).backward()
    same = copy.deepcopy(whole).bfloat16()
    mean_square(same, batch.bfloat16()).backward()
    gradients = _gradients(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            wanted = torch.bfloat16 if name == "blocks.0.up.weight" else torch.float32
            assert parameter.grad.dtype == wanted, name
        expected = same.get_parameter(name).grad.float()
        assert relative_difference(gradients[name], expected) < 0.05, name


@pytest.mark.parametrize("how", ["eager", "interpreted"])
@either_transport
def test_owned_parameters_begin_on_meta_and_keep_their_dtypes(run_ranks, how, transport):
    run_ranks(2, _low_precision, how, transport)


class _Matrices(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.weights = nn.ParameterList(
            batch_of(*size, seed=seed) for seed, size in enumerate(sizes)
        )

    def forward(self, x):
        return sum((x.unsqueeze(-1) * weight.sum(0).sum()).sum(-1) for weight in self.weights)


def _any_owners(transport):
    def check(case):
        sizes, placements = case
        model = _Matrices(sizes)
        chosen = {id(w): Owned(p) for w, p in zip(model.weights, placements, strict=True) if p < 2}
        model, reference = shard(
            model, shard_placement_fn=lambda p: chosen.get(id(p)), transport=transport
        )
        for _ in range(2):
            mean_square(model, mine(batch_of(2, 2))).backward()
            mean_square(reference, batch_of(2, 2)).backward()
        _assert_same_gradients(model, reference)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), reference.get_parameter(name))

    size = st.lists(st.integers(1, 5), min_size=1, max_size=3)
    matrix = st.tuples(size, st.integers(0, 2))
    cases = st.lists(matrix, min_size=1, max_size=4).map(lambda each: list(zip(*each, strict=True)))
    for_all(cases, check, examples=30)


@either_transport
def test_any_shapes_and_owners(run_ranks, transport):
    run_ranks(2, _any_owners, transport)


def _bytes(how, transport):
    def of(model):
        run = compiled(model, how)
        mean_square(run, mine(batch_of(4, 12))).backward()
        with record_collectives() as few:
            mean_square(run, mine(batch_of(4, 12))).backward()
        with record_collectives() as many:
            mean_square(run, mine(batch_of(64, 12))).backward()
        assert list(map(str, few)) == list(map(str, many))
        return {
            op: sum(c.nbytes for c in few if c.op == op) for op in ("all_gather", "reduce_scatter")
        }

    torch.manual_seed(0)
    whole = Stack(width=12)
    of_owners = of(_owned(copy.deepcopy(whole), transport=transport)[0])
    of_shards = of(shard(whole, whole.blocks, transport=transport)[0])
    assert of_owners == of_shards


def test_owners_move_the_bytes_of_shards_whatever_the_batch(run_ranks):
    run_ranks(2, _bytes, "interpreted", "c10d")


def _large(transport):
    """A gradient of several blocks of shared memory."""
    torch.manual_seed(0)
    model = nn.Linear(1024, 1300, bias=False)
    model, reference = shard(model, shard_placement_fn=lambda p: Owned(1), transport=transport)
    mean_square(model, mine(batch_of(4, 1024))).backward()
    mean_square(reference, batch_of(4, 1024)).backward()
    _assert_same_gradients(model, reference)


@either_transport
def test_a_large_matrix_has_an_owner(run_ranks, transport):
    run_ranks(2, _large, transport)


# ---- checkpoints


def _built(seed, has_owners):
    torch.manual_seed(seed)
    model = Stack()
    owners = MatrixOwners(model, is_matrix=_in_blocks)
    fn = owners if has_owners else None
    model, _ = shard(model, model.blocks, shard_placement_fn=fn)
    return model, _muon_and_adam(model, owners)


def _save(folder, has_owners):
    model, optimizers = _built(1, has_owners)
    _step(model, optimizers, batch_of(8, 8))
    values, states = get_state_dict(model, optimizers)
    dcp.save({"model": values, "optimizer": states}, checkpoint_id=folder)
    return _continued(model, optimizers)


def _load(folder, has_owners):
    model, optimizers = _built(2, has_owners)
    values, states = get_state_dict(model, optimizers)
    dcp.load({"model": values, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizers, model_state_dict=values, optim_state_dict=states)
    return _continued(model, optimizers)


def _continued(model, optimizers):
    """Returns the values now, and after an update by gradients that all numbers of ranks have."""
    before = copy.deepcopy(get_model_state_dict(model, options=FULL))
    for seed, (_, parameter) in enumerate(model.named_parameters()):
        gradient = batch_of(*parameter.shape, seed=seed)
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    for optimizer in optimizers:
        optimizer.step()
    return before, {n: p.full_tensor().detach() for n, p in model.named_parameters()}


@pytest.mark.smoke
def test_a_run_with_owners_goes_on_with_other_ranks_and_with_shards(run_ranks, tmp_path):
    of_owners, of_shards = tmp_path / "owners", tmp_path / "shards"
    saved, _ = run_ranks(2, _save, of_owners, True)
    for world_size in (4, 1):
        for loaded in run_ranks(world_size, _load, of_owners, True):
            torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    loaded, _ = run_ranks(2, _load, of_owners, False)
    torch.testing.assert_close(loaded[0], saved[0], rtol=0, atol=0)
    saved, _ = run_ranks(2, _save, of_shards, False)
    loaded, _ = run_ranks(2, _load, of_shards, True)
    torch.testing.assert_close(loaded[0], saved[0], rtol=0, atol=0)
    torch.testing.assert_close(loaded[1], saved[1], rtol=1e-2, atol=1e-3)  # torch splits matmuls


# ---- owners


def _mesh_of(world_size):
    return SimpleNamespace(ndim=1, size=lambda dim: world_size)


def test_matrices_are_spread_by_cost():
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(100, 8),
                "layers": nn.ModuleList(nn.Linear(8 + i % 3, 8 * (1 + i % 4)) for i in range(20)),
            }
        )
    for world_size in (2, 3, 8):
        owners = MatrixOwners(model, _mesh_of(world_size))
        assert {*owners.rank_of} == {f"layers.{i}.weight" for i in range(20)}
        mean = sum(owners.costs) / world_size
        assert max(owners.costs) < 1.1 * mean
        assert owners(model.layers[0].weight) == Owned(owners.rank_of["layers.0.weight"])
        assert owners(model.layers[0].bias) is None
    by_name = MatrixOwners(model, _mesh_of(2), is_matrix=lambda n, p: "embedding" in n, cost=len)
    assert by_name.rank_of == {"embedding.weight": 0}
    assert by_name.costs == [100, 0]


# ---- errors


def _refusals():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"Owned\(rank=2\) for 'weight', which is sharded over 2"):
        fully_shard(model, shard_placement_fn=lambda p: Owned(2))
    with pytest.raises(Zero3Error, match="owner=0"):
        fully_shard(model, shard_placement_fn=lambda p: Owned(dist.get_rank()))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    parallel = nn.Linear(4, 4)
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight, mesh["tp"], [Shard(0)]))
    with pytest.raises(NotImplementedError, match="'weight' is a DTensor already"):
        fully_shard(parallel, mesh=mesh["dp"], shard_placement_fn=lambda p: Owned(0))
    fully_shard(model, shard_placement_fn=lambda p: Owned(0))
    assert "weight" in str(explain(model, batch_of(2, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mean_square(model, batch_of(2, 4))).backward()
    if dist.get_rank() == 0:
        with pytest.raises(Zero3Error, match="GradScaler"):
            scaler.unscale_(optimizer)
        with pytest.raises(Zero3Error, match=r"on rank 0 of .* alone"):
            model.weight.grad.full_tensor()
    else:
        assert model.weight.grad is None
    with pytest.raises(NotImplementedError, match="cannot be redistributed"):
        model.weight.redistribute(placements=[Shard(0)])
    optimizer.step()
    assert bool(optimizer.state[model.weight]) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        with pytest.raises(Zero3Error, match="full_state_dict"):
            get_optimizer_state_dict(model, optimizer, options=FULL)


@pytest.mark.smoke
def test_what_an_owner_cannot_do_is_refused(run_ranks):
    run_ranks(2, _refusals)
