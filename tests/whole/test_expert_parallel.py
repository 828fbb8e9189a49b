"""Experts on meshes of their own, beside dense layers on others, compared with one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import experts, transformer_models
from support.job import needs_a_job
from support.mesh_models import fsdp2_common, mean_of, replicas
from support.models import (
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    mean_square,
    mine,
    optimizers_of,
    step,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from deepcompile_zero3 import Zero3Error, clip_grad_norm_, fully_shard
from deepcompile_zero3.sharding.module_parameters import parameters_of

EXPERTS, WIDTH = 4, 8


class Experts(nn.Module):
    """Experts in one weight, [experts, width, width], each of which every token may use."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x, shares):
        """Returns what experts make of ``x``, [tokens, width], summed by ``shares``.

        A weight that is a DTensor has this rank's experts. They compute for the tokens of all
        ranks of its mesh, of which each gets the sums of its own.
        """
        if not isinstance(self.weight, DTensor):
            return self.sum(x, shares, self.weight)
        mesh, weight = self.weight.device_mesh, self.weight.to_local()
        x, shares = (
            DTensor.from_local(t, mesh, [Shard(0)])
            .redistribute(mesh, [Replicate()])
            .to_local(grad_placements=[Partial()])
            for t in (x, shares)
        )
        shares = shares.chunk(mesh.size(), 1)[mesh.get_local_rank()]
        sums = DTensor.from_local(self.sum(x, shares, weight), mesh, [Partial()])
        return sums.redistribute(mesh, [Shard(0)]).to_local()

    @staticmethod
    def sum(x, shares, weight):
        return torch.einsum("te,ted->td", shares, torch.einsum("tw,ewd->ted", x, weight).tanh())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1)
        return x + self.experts(x, scores * chosen)


def _model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, WIDTH))


def _divide_experts(model, mesh):
    """Gives each rank of ``mesh`` a part of the experts."""
    for layer in model[1:3]:
        weight = distribute_tensor(layer.experts.weight, mesh, [Shard(0)])
        layer.experts.weight = nn.Parameter(weight)


def _train(run, model, reference, loss_of, steps):
    """Compares losses, gradients, norms and parameters. ``loss_of(run, seed)`` returns a loss."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    for seed in range(steps):
        loss, whole = loss_of(run, seed, is_whole=False), loss_of(reference, seed, is_whole=True)
        loss.backward()
        whole.backward()
        assert mean_of(loss) == pytest.approx(whole.item(), rel=1e-5)
        assert_same_gradients(model, reference)
        norms = [clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
        torch.testing.assert_close(*norms)
        step(optimizers)
    assert_same_parameters(model, reference)


def _expert_parallel(how, transport, dense_shape, in_parts, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    dense = {
        "mesh": init_device_mesh("cpu", dense_shape),
        "transport": transport,
        "shard_optimizer_over_replicas": in_parts,
    }
    model = _model()
    reference = copy.deepcopy(model)
    _divide_experts(model, mesh["ep"])
    for layer in model[1:3]:
        fully_shard(layer.experts, mesh=mesh["efsdp"], transport=transport)
        layer.experts.set_gradient_divide_factor(dist.get_world_size())
        fully_shard(layer, **dense)
    fully_shard(model, **dense)
    run = compiled(model, how, fullgraph=True)

    def loss_of(run, seed, is_whole):
        batch = batch_of(8, WIDTH, seed=seed)
        return mean_square(run, batch if is_whole else mine(batch))

    _train(run, model, reference, loss_of, steps=20)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = fully_shard(_model(), transport=transport)  # every rank has rows of all experts
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    for (fqn, loaded), saved in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(loaded.full_tensor(), saved.full_tensor()), fqn


@pytest.mark.parametrize(
    ("how", "transport", "dense_shape", "in_parts"),
    [
        ("eager", "shared_memory", (4,), False),
        ("interpreted", "c10d", (2, 2), True),
        pytest.param("interpreted", "c10d", (2, 2), False, marks=pytest.mark.more),
        pytest.param("eager", "shared_memory", (2, 2), True, marks=pytest.mark.more),
        pytest.param("eager", "c10d", (2, 2), False, marks=pytest.mark.long),
        pytest.param("interpreted", "shared_memory", (4,), False, marks=pytest.mark.long),
    ],
)
def test_experts_of_each_rank_train_beside_dense_layers(
    run_ranks, tmp_path, how, transport, dense_shape, in_parts
):
    run_ranks(4, _expert_parallel, how, transport, dense_shape, in_parts, str(tmp_path))


def _qwen3_moe(how, transport, steps):
    mesh = replicas()
    task = transformer_models.qwen3_moe()
    model, reference = task.model, copy.deepcopy(task.model)
    for block in task.blocks:
        fully_shard(block.mlp.experts, mesh=mesh, transport=transport)
        fully_shard(block, transport=transport)
    fully_shard(model, transport=transport)

    def loss_of(run, seed, is_whole):
        batch = task.batch(4, seed=seed)
        return run(**{k: v if is_whole else mine(v) for k, v in batch.items()}).loss

    _train(compiled(model, how), model, reference, loss_of, steps)


@pytest.mark.parametrize(
    ("how", "transport", "steps"),
    [
        ("eager", "shared_memory", 3),
        pytest.param("eager", "c10d", 20, marks=pytest.mark.long),
        pytest.param("interpreted", "c10d", 20, marks=pytest.mark.long),
        pytest.param("interpreted", "shared_memory", 3, marks=pytest.mark.long),
    ],
)
def test_replicated_experts_train_beside_sharded_layers(run_ranks, how, transport, steps):
    run_ranks(4, _qwen3_moe, how, transport, steps)


# The experts that each rank uses in a step. Ranks 0 and 2 have one shard each, like 1 and 3.
CHOICES = [((0,), (), (1,), ()), ((), (), (), ()), ((0,), (2,), (0, 1), (0,)), ((), (1,), (), (2,))]


def _some_ranks(transport):
    model = experts.Experts(WIDTH)
    reference = copy.deepcopy(model)
    of_experts = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
    fully_shard(list(model.experts), mesh=of_experts, transport=transport)
    fully_shard(model, transport=transport).set_reduce_scatter_unused_params(True)
    optimizers = optimizers_of(model, reference)
    for seed, choices in enumerate(CHOICES):
        batch = batch_of(8, WIDTH, seed=seed)
        mean_square(lambda x, c=choices: model(x, c[dist.get_rank()]), mine(batch)).backward()
        experts.loss_of_all(reference, batch, choices).backward()
        assert_same_gradients(model, reference)
        step(optimizers)
        assert_same_parameters(model, reference)
    assert model.experts[3].weight.grad is None


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_experts_on_a_mesh_of_their_own_may_be_used_by_some_ranks(run_ranks, transport):
    run_ranks(4, _some_ranks, transport)


# ---- experts that compute with local tensors


class OnLocalTensors(nn.Module):
    """Registers the local tensor while it computes, as transformers' expert parallelism does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x):
        shard = self._parameters["weight"]
        self._parameters["weight"] = shard.to_local()
        try:
            return self.compute(x)
        finally:
            self._parameters["weight"] = shard

    def compute(self, x):
        return x @ self.weight.t()


def _on_local_tensors(how):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model, x = OnLocalTensors(), batch_of(8, WIDTH)
    whole = model.weight.detach().clone().requires_grad_()
    model.weight = nn.Parameter(distribute_tensor(whole.detach(), mesh["ep"], [Shard(0)]))
    fully_shard(model, mesh=mesh["efsdp"])
    model.compute = compiled(model.compute, how)
    shard = model.weight
    for other in (shard.to_local().t(), shard.to_local().clone()):
        model._parameters["weight"] = other
        with pytest.raises(Zero3Error, match="'weight' was replaced by a Tensor"):
            parameters_of(model)["weight"].refresh()
    model._parameters["weight"] = shard
    optimizer, expected = (torch.optim.SGD(p, lr=1.0) for p in (model.parameters(), [whole]))
    for _ in range(2):
        model(x).square().mean().backward()
        sum((x @ part.t()).square().mean() for part in whole.chunk(2)).backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), whole.grad)
        step([optimizer, expected])


@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_experts_may_register_their_local_tensors_while_they_compute(run_ranks, how):
    run_ranks(4, _on_local_tensors, how)


# ---- a mesh for each parameter of one call


def _placed(how, transport):
    fsdp2 = fsdp2_common()
    whole = init_device_mesh("cpu", (4,))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = _model()
    reference, theirs = copy.deepcopy(model), copy.deepcopy(model)
    of_experts = fsdp2.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    of_biases = fsdp2.HSDPMeshInfo(replicas(), shard_mesh_dim=1, replicate_mesh_dim=0)

    def placement(parameter):
        if isinstance(parameter, DTensor):
            return fsdp2.ShardPlacementResult(Shard(1), of_experts)
        if parameter.dim() == 1:
            return fsdp2.ShardPlacementResult(None, of_biases)
        return Shard(parameter.dim() - 1)

    for sharded, shard, settings in (
        (model, fully_shard, {"transport": transport}),
        (theirs, torch_fully_shard, {}),
    ):
        _divide_experts(sharded, mesh["ep"])
        for module in (*sharded[1:3], sharded):
            shard(module, mesh=whole, shard_placement_fn=placement, **settings)
    batch = batch_of(8, WIDTH)
    run = compiled(model, how)
    for forward in (run, theirs):
        mean_square(forward, mine(batch)).backward()
    mean_square(reference, batch).backward()
    for (fqn, ours), expected in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert ours.placements == expected.placements, fqn
        assert ours.device_mesh == expected.device_mesh, fqn
        torch.testing.assert_close(ours.grad.to_local(), expected.grad.to_local())
    for layer in reference[1:3]:
        layer.experts.weight.grad *= 2  # a mean over two ranks of four
    assert_same_gradients(model, reference)


@pytest.mark.parametrize(
    ("how", "transport"), [("eager", "shared_memory"), ("interpreted", "c10d")]
)
def test_each_parameter_of_a_call_may_have_a_mesh(run_ranks, how, transport):
    run_ranks(4, _placed, how, transport)


@needs_a_job
def test_a_mesh_that_shards_another_dimension_than_its_last_is_refused():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "replicate"))
    fsdp2 = fsdp2_common()
    other = fsdp2.HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1)
    model = _model()
    with pytest.raises(ValueError, match=r"'0\.weight', replicating over dimension 1 and"):
        fully_shard(model, shard_placement_fn=lambda p: fsdp2.ShardPlacementResult(None, other))
    assert type(model[0]) is nn.Linear
