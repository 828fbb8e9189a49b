"""A plan predicts what a step of real ranks sends, and the time on a machine."""

import functools
import itertools
import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from support import transformer_models
from support.models import Stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from deepcompile_zero3 import (
    MACHINES,
    Zero3Error,
    explain,
    fully_shard,
    plan,
    record_collectives,
    shard_blocks,
)
from deepcompile_zero3.sharding.module_parameters import all_parameters_of

SMALL = {"gather_bucket_mb": 0.02, "keep_mb": 0.02}


def _build(name):
    return lambda: getattr(transformer_models, name)().model


def _call(name, size=2):
    return getattr(transformer_models, name)().batch(size, seed=0)


def _settings(reduce_dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return {"mp_policy": policy, "transport": "c10d"}


def _sent(collectives):
    """Returns the number of collectives and their bytes, by kind."""
    number, nbytes = Counter(), Counter()
    for collective in collectives:
        number[collective.op] += 1
        nbytes[collective.op] += collective.nbytes
    return {op: (number[op], nbytes[op]) for op in number}


def _shard(reduce_dtype, bucket_bytes, model, mesh):
    shard_blocks(model, mesh, **_settings(reduce_dtype))
    for parameter in all_parameters_of(model, "a test"):
        parameter.settings = parameter.settings.replace(bucket_bytes=bucket_bytes)
    return model


def _step(name, shape, reduce_dtype, bucket_bytes):
    mesh = init_device_mesh("cpu", shape)
    model = _shard(reduce_dtype, bucket_bytes, _build(name)(), mesh)
    run = torch.compile(model, backend="zero3", options=SMALL | {"inductor": False})
    batch = _call(name)
    run(**batch).loss.backward()
    with record_collectives() as collectives:
        run(**batch).loss.backward()
    return _sent(collectives)


def _planned(name, shape, reduce_dtype, bucket_bytes):
    found = plan(
        _build(name),
        _call(name),
        world_size=torch.Size(shape).numel(),
        replicas=shape[0] if len(shape) == 2 else 1,
        shard=functools.partial(_shard, reduce_dtype, bucket_bytes),
        options=SMALL,
    )
    return {op: (traffic.number, traffic.nbytes) for op, traffic in found.traffic.items()}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("vit", "t5"))]
)
def test_real_ranks_send_what_was_planned(run_ranks, name):
    settings = name, (2,), torch.float32, 1 << 14
    expected = _planned(*settings)
    for sent in run_ranks(2, _step, *settings, timeout=300):
        assert sent == expected
    assert expected["reduce_scatter"][0] > 2


@pytest.mark.long
def test_replicas_send_what_was_planned(run_ranks):
    settings = "llama", (2, 2), None, 1 << 14
    expected = _planned(*settings)
    for sent in run_ranks(4, _step, *settings, timeout=300):
        assert sent == expected
    assert expected["all_reduce"][0] > 2


def _wide(layers=2):
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=layers,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=128256,
            use_cache=False,
        )
    )


def _tokens(batch, sequence):
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def _in_bf16(model, mesh):
    shard_blocks(
        model,
        mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    )


@pytest.fixture(scope="module")
def large():
    return plan(_wide, _tokens(1, 2048), world_size=1024, shard=_in_bf16)


@pytest.mark.more
def test_a_thousand_ranks_share_a_model_that_no_memory_here_holds(large):
    numel = sum(p.numel() for p in _on_meta(_wide).parameters())
    assert large.report.world_size == 1024
    assert large.memory["shards"] == pytest.approx(4 * numel / 1024, rel=0.01)
    assert large.memory["optimizer"] == 2 * large.memory["shards"]
    # All in forward, and again in backward except kept parameters, at most 64 MiB.
    gathered = large.traffic["all_gather"].nbytes
    embedding = 128256 * 8192
    assert gathered == pytest.approx(2 * (2 * numel - embedding), rel=0.02)
    assert large.traffic["reduce_scatter"].nbytes == pytest.approx(2 * numel, rel=0.01)
    assert 0 < large.waiting < large.seconds
    assert large.computing + large.waiting == pytest.approx(large.seconds)


def _on_meta(build):
    with torch.device("meta"):
        return build()


def test_its_text_is_for_80_columns_and_its_dict_for_json(large, tmp_path):
    assert max(map(len, str(large).splitlines())) <= 80
    assert "1024 ranks of h100" in str(large)
    told = json.loads(json.dumps(large.to_dict()))
    assert told["traffic"]["all_gather"]["number"] == large.traffic["all_gather"].number
    assert told["fits"] is True
    assert told["tokens_per_second"] == pytest.approx(1024 * 2048 / large.seconds)
    assert f"{told['tokens_per_second']:,.0f} tokens/s" in str(large)
    large.save(tmp_path / "page.html")
    assert "model.layers.1.mlp.down_proj.weight" in (tmp_path / "page.html").read_text()


def test_spans_of_a_lane_follow_each_other_and_memory_is_never_negative(large):
    timeline = large.report.timeline
    for lane in ("compute", "waiting", "gather", "reduce"):
        spans = sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: s.start)
        assert spans
        for one, next_one in itertools.pairwise(spans):
            assert one.end <= next_one.start + 1e-12
    assert all(nbytes >= 0 for _, kinds in timeline.memory for nbytes in kinds)
    # At the end, only the memory from before the step is left.
    last = dict(zip(timeline.kinds, timeline.memory[-1][1], strict=True))
    assert last["activations"] == last["gathered"] == last["communication"] == 0


@pytest.mark.long
def test_a_quicker_machine_takes_less_and_numbers_can_be_set(large):
    slow = MACHINES["h100"].with_numbers(flops=1e13, remote_bandwidth=1e9)
    other = plan(_wide, _tokens(1, 2048), world_size=1024, shard=_in_bf16, machine=slow)
    assert other.seconds > 5 * large.seconds
    assert other.traffic["all_gather"].nbytes == large.traffic["all_gather"].nbytes


def test_flops_are_those_that_torch_counts():
    def build():
        model = transformer_models.llama().model
        model.set_attn_implementation("eager")  # torch has no FLOP formula for the other on a CPU
        return model

    batch = _call("llama")
    with FlopCounterMode(display=False) as counter:
        build()(**batch).loss.backward()
    found = plan(build, batch, world_size=2)
    assert found.flops == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.long
def test_without_prefetch_all_gathers_are_waited_for():
    settings = {"world_size": 64, "shard": _in_bf16}
    found = plan(_wide, _tokens(1, 2048), prefetch=False, **settings)
    gathering = found.traffic["all_gather"].seconds
    assert found.waiting >= gathering * 0.9
    assert found.seconds > plan(_wide, _tokens(1, 2048), **settings).seconds


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4096, 4096))

    def forward(self, x):
        return torch.bmm(x, self.weight).square().mean()


def test_padding_is_pointed_out():
    call = {"x": torch.zeros(8, 16, 4096)}
    found = plan(Experts, call, world_size=32)
    assert any("'weight' has 8 rows over 32 ranks" in line for line in found.advice)
    assert found.traffic["all_gather"].nbytes >= 4 * 8 * 4096 * 4096 * 4


def test_a_plan_that_does_not_fit_says_so():
    tight = MACHINES["h100"].with_numbers(memory=1e9)
    found = plan(_wide, _tokens(1, 2048), world_size=64, shard=_in_bf16, machine=tight)
    assert not found.fits
    assert "memory: " in str(found)
    (remedy,) = (line for line in found.advice if "does not fit" in line)
    assert "What helps there" in remedy
    assert not any("a larger batch hides them" in line for line in found.advice)


@pytest.mark.more
def test_activations_in_host_memory_are_not_in_the_plan():
    def on_gpu(**options):
        call = {"x": torch.zeros(2**15, 256)}
        found = plan(lambda: Stack(256, depth=4), call, world_size=2, options=options)
        assert any(found.moved) == bool(options)
        assert not any("store" in span.name for span in found.report.timeline.spans)
        return found.memory["activations"]

    whole = on_gpu()
    assert on_gpu(activations_mb=0) < 0.5 * whole
    assert on_gpu(activations_mb=0) < on_gpu(activations_mb=whole / 2**21) < whole


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
            torch._dynamo.graph_break()
        return x.square().mean()


def test_a_model_in_several_graphs_frees_what_each_has_saved():
    found = plan(Broken, {"x": torch.zeros(8, 64, requires_grad=True)}, world_size=4)
    timeline = found.report.timeline
    last = dict(zip(timeline.kinds, timeline.memory[-1][1], strict=True))
    assert len(found.report.breaks) >= 1
    assert last["activations"] == last["gathered"] == 0


def test_frozen_parameters_have_no_optimizer_state():
    class Adapted(Experts):
        def __init__(self):
            super().__init__()
            self.adapter = nn.Linear(4096, 4096, bias=False)
            self.weight.requires_grad_(False)

        def forward(self, x):
            return self.adapter(torch.bmm(x, self.weight)).square().mean()

    found = plan(Adapted, {"x": torch.zeros(8, 16, 4096)}, world_size=4)
    assert found.memory["optimizer"] == 8 * 4096 * 4096 / 4


class Tied(nn.Module):
    """A model whose table is read twice and not sharded."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("root", [False, True])
def test_unsharded_parameters_are_in_the_plan(root):
    def shard(model, mesh):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        if root:
            fully_shard(model, mesh=mesh, ignored_params={model.table.weight})

    call = {"ids": torch.zeros(8, 16, dtype=torch.int64)}
    found = plan(Tied, call, world_size=4, shard=shard, advise=False)
    assert found.report.parameters == 4
    assert found.flops == 3 * 2 * 8 * 16 * 32 * (2 * 32 + 64)
    assert "computed in f32" in str(found)


@pytest.mark.usefixtures("one_rank")
def test_a_simulation_is_in_nobody_elses_log():
    task = transformer_models.llama()
    fully_shard(task.model)
    with record_collectives() as log:
        report = explain(task.model, options={"inductor": False}, **task.batch(2, seed=0))
    assert report.timeline.spans
    assert not any("simulated" in name for collective in log for name in collective.params)
    assert {collective.op for collective in log} == {"all_gather"}


# ---- no traces, and errors


def test_nothing_is_left(one_rank):
    dist.destroy_process_group()
    try:
        plan(_build("llama"), _call("llama"), world_size=8)
        assert not dist.is_initialized()
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(Zero3Error, match="without a process group"):
        plan(_build("llama"), _call("llama"), world_size=8)


def test_wrong_calls_are_refused():
    call = _call("llama")
    with pytest.raises(TypeError, match="build is called and makes the model: give its class"):
        plan(Tied(), call, world_size=8)
    with pytest.raises(TypeError, match="build makes the model and nothing else, got tuple"):
        plan(lambda: (Tied(), call), call, world_size=8)
    with pytest.raises(TypeError, match="call is a dict of keyword arguments, got list"):
        plan(Tied, [torch.zeros(8)], world_size=8)
    with pytest.raises(Zero3Error, match="Tied was sharded by something else: import fully_shard"):
        plan(Tied, call, world_size=8, shard=lambda m, mesh: fsdp2_shard(m, mesh=mesh))


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="divisor of the number of ranks, 8; got 3"):
        plan(_build("llama"), _call("llama"), world_size=8, replicas=3)
    with pytest.raises(ValueError, match="one of a100, h100, h200, b200, got 'v100'"):
        plan(_build("llama"), _call("llama"), world_size=8, machine="v100")
    with pytest.raises(ValueError, match="no 'bandwith'"):
        MACHINES["h100"].with_numbers(bandwith=1.0)
    with pytest.raises(ValueError, match="'launch' of a machine must be a positive number, got -1"):
        MACHINES["h100"].with_numbers(launch=-1)
