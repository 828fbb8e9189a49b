"""Frozen parameters of tensor subclasses without extensions: torchao's weights for inference."""

import copy

import pytest
import torch
from support.extensions import Wrapped
from support.models import (
    assert_same_gradients,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3 import Zero3Error, explain, fully_shard, record_collectives, torch_internals

quantization = pytest.importorskip("torchao.quantization")
granularity = pytest.importorskip("torchao.quantization.granularity")

_FORMATS = {
    "int8": lambda: quantization.Int8WeightOnlyConfig(version=2),
    "int8, one scale": lambda: quantization.Int8WeightOnlyConfig(
        version=2, granularity=granularity.PerTensor()
    ),
    "int4 in groups": lambda: quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=granularity.PerGroup(32)
    ),
}


class _Adapted(nn.Module):
    """A quantized layer that is frozen, and an adapter that is trained."""

    def __init__(self, rows, width):
        super().__init__()
        self.base = nn.Linear(width, rows, bias=False).requires_grad_(False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, rows, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def _model(form, rows=(66, 3)):
    torch.manual_seed(0)
    model = nn.Sequential(
        _Adapted(rows[0], 64), nn.Linear(rows[0], 64), _Adapted(rows[1], 64), nn.Linear(rows[1], 4)
    )
    for each in model:
        if isinstance(each, _Adapted):
            quantization.quantize_(each.base, _FORMATS[form]())
    return model


def _train(how, form, transport):
    model = _model(form)
    reference = copy.deepcopy(model)
    for block in model:
        fully_shard(block, transport=transport)
    fully_shard(model, transport=transport)
    whole = [m.base.weight for m in reference if isinstance(m, _Adapted)]
    run = compiled(model, how, fullgraph=how != "eager")
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (model, reference)
    ]
    for seed in range(3):
        batch = batch_of(8, 64, seed=seed)
        with record_collectives() as log:
            mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        assert_same_gradients(model, reference)
        if torch.distributed.get_world_size() > 1:
            codes = sum(c.nbytes for c in log if c.op == "all_gather" and c.dtype == torch.int8)
            assert codes >= 2 * 66 * 64
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    shards = [m.base._parameters["weight"] for m in model if isinstance(m, _Adapted)]
    for block, shard, expected in zip((model[0], model[2]), shards, whole, strict=True):
        assert type(torch_internals.local_tensor(shard)) is type(expected.detach())
        block.unshard()
        full = block.base.weight
        for name in expected.__tensor_flatten__()[0]:
            assert torch.equal(getattr(full, name), getattr(expected, name)), name
        block.reshard()


@each_way
@either_transport
@pytest.mark.parametrize("form", _FORMATS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.thin
def test_adapters_on_torchaos_weights_for_inference(run_ranks, world_size, form, how, transport):
    run_ranks(world_size, _train, how, form, transport, timeout=200)


class _Packed(Wrapped):
    """Two rows of the parameter in one of the inner tensor."""

    def __init__(self, inner):
        self.inner = inner.reshape(inner.shape[0] // 2, -1) if inner.shape[0] > 1 else inner


class _Declines(Wrapped):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.slice.Tensor:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Dequantizes(Wrapped):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.slice.Tensor:
            return func(args[0].inner, *args[1:])
        return super().__torch_dispatch__(func, types, args, kwargs)


def _refused():
    model = nn.Linear(8, 8, bias=False)
    weight = model.weight.detach()
    model.weight = nn.Parameter(Wrapped(weight))
    with pytest.raises(NotImplementedError, match=r"'weight' is a Wrapped.* is trained"):
        fully_shard(model)
    columns = Wrapped(weight.t().contiguous().t())
    others = [_Packed(weight), _Declines(weight), _Dequantizes(weight), columns]
    for value in (*others, Wrapped(torch.ones(()))):
        model.weight = nn.Parameter(value, requires_grad=False)
        with pytest.raises(NotImplementedError, match=r"'weight' is a .*a row for each row"):
            fully_shard(model)
    model = _model("int8")
    with pytest.raises(
        NotImplementedError, match=r"'base.weight' is a Int8Tensor of torch.float32"
    ):
        fully_shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def test_others_are_refused(run_ranks):
    run_ranks(1, _refused)


def _explained():
    model = _model("int8")
    report = str(explain(fully_shard(model, transport="c10d"), batch_of(8, 64)))
    assert "0.base.weight.payload_0" in report
    assert "i8/f32" in report


@pytest.mark.long
def test_explain_knows_inner_tensors(run_ranks):
    run_ranks(1, _explained)


def _replaced():
    model = _model("int8")
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model(batch_of(2, 64))
    local = torch_internals.local_tensor(model[0].base._parameters["weight"])
    local.act_pre_scale = torch.ones(64)
    with pytest.raises(Zero3Error, match=r"'0.base.weight' is a Int8Tensor now, without the inner"):
        model(batch_of(2, 64))


def test_another_shard_is_noticed(run_ranks):
    run_ranks(1, _replaced)


def _unlike():
    model = _model("int8, one scale")[0]
    if torch.distributed.get_rank() == 1:
        model.base.weight.scale.mul_(2)
    with pytest.raises(Zero3Error, match=r"Int8Tensor.*checksums"):
        fully_shard(model)


def test_a_scale_for_all_is_the_same_on_all_ranks(run_ranks):
    run_ranks(2, _unlike)
