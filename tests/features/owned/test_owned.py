"""Parameters that one rank owns: whole on that rank, gathered and reduced like any other."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from support.mesh_models import replicas
from support.models import (
    Stack,
    assert_same_gradients,
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
    step,
)
from support.owned_models import LOAD_FULL, in_blocks, muon_and_adam, owned
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from deepcompile_zero3 import (
    MatrixOwners,
    Owned,
    Zero3Error,
    clip_grad_norm_,
    defer_reduction,
    deposit_grad,
    fully_shard,
    gradient_norms,
    record_collectives,
)

# ---- training


def _steps_bit_for_bit(how, transport):
    model, reference, owners = owned(Stack(depth=3), transport=transport)
    run = compiled(model, how, fullgraph=how != "eager")
    ours, theirs = muon_and_adam(model, owners), muon_and_adam(reference, owners)
    updated = []
    newton_schulz = torch.optim._muon._zeropower_via_newtonschulz

    def counted(grad, *args):
        if not isinstance(grad, DTensor) or grad.device_mesh.get_coordinate() is not None:
            updated.append(tuple(grad.shape))  # else torch computes nothing
        return newton_schulz(grad, *args)

    for seed in range(3):
        batch = batch_of(8, 8, seed=seed)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        assert_same_gradients(model, reference, 1e-4 if seed else 1e-5)  # Muon amplifies rounding
        for name, parameter in model.named_parameters():
            reference.get_parameter(name).grad.copy_(parameter.grad.full_tensor())
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


@pytest.mark.thin
@each_way
@either_transport
@pytest.mark.parametrize("world_size", [2, 4])
def test_each_matrix_is_updated_once_as_in_one_process(run_ranks, how, transport, world_size):
    updated = run_ranks(world_size, _steps_bit_for_bit, how, transport)
    assert sum(map(len, updated)) == 3 * 6


def _replicated(transport):
    model, reference, _ = owned(Stack(), replicas(), transport=transport)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    weight = model.blocks[0].up.weight
    assert weight.device_mesh.shape == (2, 1)
    assert weight.placements == (Replicate(), Replicate())
    for micro in range(4):
        model.set_requires_all_reduce(micro % 2 == 1)
        batch = batch_of(8, 8, seed=micro)
        mean_square(model, mine(batch)).backward()
        mean_square(reference, batch).backward()
        if micro % 2:
            assert_same_gradients(model, reference)
            norms = [clip(m.parameters(), 0.1) for clip, m in _clips(model, reference)]
            torch.testing.assert_close(*norms)
            step(optimizers)
            assert_same_parameters(model, reference)


def _clips(model, reference):
    return (clip_grad_norm_, model), (nn.utils.clip_grad_norm_, reference)


@either_transport
def test_replicas_of_an_owner_stay_equal(run_ranks, transport):
    run_ranks(4, _replicated, transport)


def _settings(how, transport, **settings):
    model, reference, _ = owned(Stack(), transport=transport, **settings)
    run = compiled(model, how)
    for micro in range(3):
        model.set_requires_gradient_sync(micro > 0)
        batch = batch_of(8, 8, seed=micro)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    norms = gradient_norms(model)
    for name, parameter in reference.named_parameters():
        assert norms[name] == pytest.approx(parameter.grad.norm().item(), rel=1e-4)
    totals = [clip(m.parameters(), 0.1) for clip, m in _clips(model, reference)]
    torch.testing.assert_close(*totals)
    assert_same_gradients(model, reference)
    model.zero_grad()
    reference.zero_grad()
    with defer_reduction(model):
        mean_square(run, mine(batch_of(8, 8))).backward()
        deposit_grad(model.blocks[0].up.weight, torch.full((16, 8), 1.0 + dist.get_rank()))
    mean_square(reference, batch_of(8, 8)).backward()
    reference.blocks[0].up.weight.grad += (1 + dist.get_world_size()) / 2
    assert_same_gradients(model, reference)


@pytest.mark.thin
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
    assert_same_gradients(model, reference)


@each_way
@either_transport
@pytest.mark.more
def test_owned_parameters_may_be_tied_strided_and_missing(run_ranks, how, transport):
    run_ranks(3, _differ_in_use, how, transport)


def _low_precision(how, transport):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Stack(width=16)
    model.blocks[0].up.weight.grad_dtype = torch.bfloat16
    owners = MatrixOwners(model, is_matrix=in_blocks)
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
        options=LOAD_FULL,
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name
    batch = batch_of(4, 16)
    mean_square(compiled(model, how), mine(batch)).backward()
    same = copy.deepcopy(whole).bfloat16()
    mean_square(same, batch.bfloat16()).backward()
    for name, parameter in model.named_parameters():
        wanted = torch.bfloat16 if name == "blocks.0.up.weight" else torch.float32
        assert parameter.grad.dtype == wanted, name
        expected = same.get_parameter(name).grad.float()
        gradient = parameter.grad.full_tensor()
        assert relative_difference(gradient.float(), expected) < 0.05, name


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
        return sum(x * (weight * batch_of(*weight.shape, seed=7)).sum() for weight in self.weights)


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
        assert_same_gradients(model, reference)
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
    of_owners = of(owned(copy.deepcopy(whole), transport=transport)[0])
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
    assert_same_gradients(model, reference)


@either_transport
def test_a_large_matrix_has_an_owner(run_ranks, transport):
    run_ranks(2, _large, transport)


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
    told = r"'layers.0.bias' is not a matrix: its shape is \[8\]; is_matrix has to return False"
    with pytest.raises(ValueError, match=told):
        MatrixOwners(model, _mesh_of(2), is_matrix=lambda n, p: n == "layers.0.bias")
    model.to_empty(device="cpu")
    with pytest.raises(
        ValueError, match=r"not know a parameter of shape \[8, 8\].* after to_empty"
    ):
        owners(model.layers[0].weight)
