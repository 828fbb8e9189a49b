"""torchao's NF4 and float8 weights, which are gathered by FSDP2's all-gather extensions."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.models import (
    assert_same_gradients,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
    step,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives


class Lora(nn.Module):
    """A frozen matrix of four bits, and an adapter of two small ones."""

    def __init__(self, width=128):
        super().__init__()
        nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        weight = nf4.to_nf4(torch.randn(width, width) / width**0.5, scaler_block_size=4)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, width) / 10)
        self.up = nn.Parameter(torch.randn(width, 4) / 10)
        self._linear = nf4.linear_nf4

    def forward(self, x):
        return torch.tanh(self._linear(x, self.weight) + x @ self.down.T @ self.up.T)


def _layers(number):
    return nn.Sequential(*(Lora() for _ in range(number)))


def _shard_each(model, **settings):
    for layer in model:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def _qlora(how, transport):
    torch.manual_seed(0)
    model = _layers(3)
    reference = _layers(3)
    for mine_, whole in zip(model, reference, strict=True):  # NF4Tensor.clone() would round again
        whole.weight = nn.Parameter(mine_.weight.detach(), requires_grad=False)
        whole.down.data.copy_(mine_.down)
        whole.up.data.copy_(mine_.up)
    payloads = sum(
        t.nbytes
        for layer in reference
        for t in (
            layer.weight.quantized_scalers,
            layer.weight.quantization_factor,
            layer.weight.quantized_data,
        )
    )
    _shard_each(model, transport=transport)
    at_rest = sum(
        getattr(layer.weight.to_local(), name).untyped_storage().nbytes()
        for layer in model
        for name in ("quantized_scalers", "quantization_factor", "quantized_data")
    )
    assert at_rest == payloads // torch.distributed.get_world_size()
    run = compiled(model, how, fullgraph=how != "eager")
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for m in (model, reference)
    ]
    for seed in range(3):
        batch = batch_of(8, 128, seed=seed)
        with record_collectives() as log:
            mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        for (name, parameter), whole in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            if "weight" in name:
                assert parameter.grad is None
            else:
                difference = parameter.grad.full_tensor() - whole.grad
                assert difference.norm() <= (1e-5 if seed else 1e-6) * whole.grad.norm(), name
        gathered = [c for c in log if c.op == "all_gather" and c.dtype == torch.uint8]
        assert sum(c.nbytes for c in gathered) == 2 * 3 * 128 * 128 // 2  # forward and backward
        step(optimizers)


@each_way
@either_transport
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.thin
def test_adapters_on_torchaos_nf4(run_ranks, world_size, how, transport):
    run_ranks(world_size, _qlora, how, transport, timeout=300)


def _saved(how):
    """No forward saves a weight in its compute dtype: backward computes it again."""
    model = _layers(3)
    _shard_each(model)
    for layer in model:
        assert not any(
            isinstance(v, torch.Tensor) for v in vars(layer._parameters["weight"]).values()
        )
    with capture_graphs() as graphs:
        compiled(model, how, fullgraph=True)(batch_of(2, 128)).sum().backward()
    [forward] = graphs.forward
    outputs = forward.graph_module.graph.output_node().all_input_nodes
    return [tuple(node.meta["val"].shape) for node in outputs]


def test_no_forward_saves_a_whole_weight(run_ranks):
    for shapes in run_ranks(1, _saved, "interpreted"):
        assert (128, 128) not in shapes


def _replicas():
    torch.manual_seed(0)
    model = Lora()
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    with pytest.raises(ValueError, match=r"'weight' is a NF4Tensor.*pass mesh_dim_names"):
        fully_shard(model, mesh=mesh)
    names = ("replicate", "shard")
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    fully_shard(model, mesh=mesh)
    run = compiled(model, "interpreted")
    for _ in range(2):
        mean_square(run, batch_of(4, 128)).backward()
    assert model.up.grad.full_tensor().isfinite().all()


def test_replicas_of_nf4(run_ranks):
    run_ranks(4, _replicas)


def _lora(seed):
    torch.manual_seed(0)
    model = _layers(2)
    generator = torch.Generator().manual_seed(seed)
    for layer in model:
        layer.down.data.normal_(0, 0.1, generator=generator)
        layer.up.data.normal_(0, 0.1, generator=generator)
    _shard_each(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(adapters, lr=1e-2, foreach=False)


def _trained_lora(seed, seeds, folder, action):
    """Trains adapters for some steps, after loading a checkpoint or before saving one."""
    model, optimizer = _lora(seed)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    if action == "load":
        state = get_state_dict(model, optimizer, options=options)
        dcp.load({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options
        )
    run = compiled(model, "interpreted")
    for seed in seeds:
        mean_square(run, mine(batch_of(8, 128, seed=seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
    if action == "save":
        state = get_state_dict(model, optimizer, options=options)
        assert all("weight" not in name for name in state[0])
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
    return {n: p.full_tensor().detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.more
def test_adapters_are_saved_and_resumed_on_more_ranks(run_ranks, tmp_path):
    run_ranks(2, _trained_lora, 1, range(3), str(tmp_path), "save")
    resumed = run_ranks(4, _trained_lora, 2, range(3, 6), str(tmp_path), "load")
    whole = run_ranks(2, _trained_lora, 1, range(6), str(tmp_path), "")
    for name, value in whole[0].items():
        torch.testing.assert_close(resumed[0][name], value, atol=1e-4, rtol=1e-4)


def _float8(how):
    """torchao's float8 training: weights travel in fp8, with one scale for all ranks.

    Inductor keeps fp32 where eager code rounds to bfloat16 between operators. The scales differ
    by as little, but numbers between two of fp8 round to the other one, so that gradients differ
    by 5e-2, of the whole model too. The whole model is therefore compiled as the sharded one is.
    """
    float8 = pytest.importorskip("torchao.float8")

    def build(**settings):
        torch.manual_seed(0)
        layers = nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 64, bias=False)
        model = nn.Sequential(*layers).bfloat16()
        config = float8.Float8LinearConfig(emulate=True, **settings)
        return float8.convert_to_float8_training(model, config=config)

    model, reference = build(enable_fsdp_float8_all_gather=True), build()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    run = compiled(model, how)
    run_whole = compiled(reference, "inductor" if how == "zero3" else "eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for seed in range(3):
        batch = batch_of(16, 64, seed=seed).bfloat16()
        with record_collectives() as log:
            mean_square(run, mine(batch).clone()).backward()
        losses = [mean_square(run_whole, each.clone()) for each in batch.chunk(2)]
        (sum(losses) / 2).backward()
        assert {c.dtype for c in log if c.op == "all_gather"} == {torch.float8_e4m3fn}
        assert_same_gradients(model, reference)
        step(optimizers)


@each_way
def test_torchaos_float8_training(run_ranks, how):
    run_ranks(2, _float8, how, timeout=300)
