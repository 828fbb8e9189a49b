"""Models that no rank ever holds whole: sharded on the meta device, then initialized."""

import ctypes
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from support.models import Block, assert_same_steps, batch_of, each_way, either_transport
from support.transformer_models import llama
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from deepcompile_zero3 import fully_shard, release_buffers


def _on_meta(build):
    with torch.device("meta"):
        return build()


# ---- values


class Layers(nn.Sequential):
    """Layers, some with rows that ranks do not divide evenly: [batch, 6] -> [batch, 5]."""

    def __init__(self):
        super().__init__(
            nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 8), Block(8), nn.Linear(8, 5)
        )


def _reset(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _of_nn_init(model):
    initializers = (
        nn.init.normal_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        lambda weight: nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04),
        nn.init.ones_,
    )
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    for initialize, weight in zip(initializers, matrices, strict=True):
        initialize(weight)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter)


def _of_its_config(model):
    model.apply(model._init_weights)


KINDS = {
    "reset_parameters": (Layers, _reset),
    "nn.init": (Layers, _of_nn_init),
    "llama": (lambda: llama().model, _of_its_config),
}


def _initialized(sharding, kind, replicas, seed):
    """Returns a model and the next random number of this rank."""
    build, initialize = KINDS[kind]
    model = _on_meta(build)
    mesh = init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
    )
    sharding(model, mesh=mesh if replicas > 1 else mesh["shard"])
    model.to_empty(device="cpu")
    if isinstance(seed, list):
        seed = seed[dist.get_rank()]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        initialize(model)
    return model, torch.rand(1)


def _agreed(tensor):
    everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, tensor.contiguous())
    return all(torch.equal(other, tensor) for other in everywhere)


def _as_in_fsdp2(kind):
    """Initializes as in FSDP2: each rank draws the numbers of its own shard. With one seed, shards
    of one shape are alike; with a seed for each rank, replicas differ.
    """
    for replicas, seed in ((1, 1), (1, [1, 2]), (2, 1), (2, [1, 2])):
        model, drawn = _initialized(fully_shard, kind, replicas, seed)
        expected, expected_drawn = _initialized(torch_fully_shard, kind, replicas, seed)
        assert torch.equal(drawn, expected_drawn)
        for (fqn, ours), (_, theirs) in zip(
            model.named_parameters(), expected.named_parameters(), strict=True
        ):
            assert torch.equal(ours.to_local(), theirs.to_local()), fqn
            assert ours.to_local().isfinite().all(), fqn
            if replicas == 1 or seed == 1:
                assert _agreed(ours.full_tensor()), fqn


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_initialized_as_in_fsdp2(run_ranks, kind):
    run_ranks(2, _as_in_fsdp2, kind)


def _trained(how):
    model, _ = _initialized(fully_shard, "reset_parameters", 1, [1, 2])
    reference = Layers()
    reference.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    assert_same_steps(model, reference, how, 4, 6)


@each_way
def test_a_model_that_was_initialized_in_shards_trains(run_ranks, how):
    run_ranks(2, _trained, how)


# ---- memory

MIB = 2**20
WIDTH = 5120
LAYERS = 4
LAYER = WIDTH * WIDTH * 4  # bytes: 100 MiB
SHARDS = LAYERS * LAYER / 4  # bytes of one of four ranks


def _large():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _resident(field):
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def _growth(function):
    """Returns the bytes by which peak resident memory grows while ``function()`` runs."""
    gc.collect()
    release_buffers()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise reused free memory does not count
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _resident("VmRSS")
    result = function()
    return _resident("VmHWM") - before, result


def _sharded_on_meta(**kwargs):
    model = _on_meta(_large)
    for layer in model:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def _initialized_in_shards(transport):
    def initialize():
        model = _sharded_on_meta(transport=transport).to_empty(device="cpu")
        for layer in model:
            layer.reset_parameters()
        return model

    growth, model = _growth(initialize)
    assert all(parameter.to_local().count_nonzero() for parameter in model.parameters())
    return growth


@pytest.mark.first(transport="shared_memory")
@either_transport
def test_initializing_a_model_takes_the_memory_of_its_shards(run_ranks, transport):
    for growth in run_ranks(4, _initialized_in_shards, transport):
        assert 0.9 * SHARDS <= growth <= 1.3 * SHARDS, growth / MIB


def _loaded_from_the_first_rank(materialized):
    """Loads a state of equal rows that only rank 0 has."""
    first = dist.get_rank() == 0
    names = [f"{layer}.weight" for layer in range(LAYERS)]
    rows = {name: batch_of(WIDTH, seed=seed) for seed, name in enumerate(names)}
    state = {name: row.repeat(WIDTH, 1) for name, row in rows.items()} if first else {}

    def load():
        model = _sharded_on_meta()
        if materialized:
            model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        return model

    growth, model = _growth(load)
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        assert local.device.type == "cpu"
        assert torch.equal(local, rows[name].expand_as(local)), name
    x = batch_of(2, WIDTH, seed=9)
    expected = x
    for row in rows.values():  # all outputs are the same
        expected = (expected @ row)[:, None].expand(2, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=0)
    return growth


@pytest.mark.parametrize(
    "materialized",
    [pytest.param(True, marks=pytest.mark.more), False],
    ids=["to_empty", "meta"],
)
def test_a_state_of_the_first_rank_is_loaded_a_parameter_at_a_time(run_ranks, materialized):
    for growth in run_ranks(4, _loaded_from_the_first_rank, materialized):
        assert 0.9 * SHARDS <= growth <= 1.3 * SHARDS + 2 * LAYER, growth / MIB
