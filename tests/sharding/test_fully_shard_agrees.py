"""``fully_shard`` acts alike on all ranks: it shards all of a model or nothing, under one name."""

import gc
import json

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Stack,
    assert_same_step,
    batch_of,
    compiled,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from deepcompile_zero3 import Zero3Error, fully_shard, torch_internals
from deepcompile_zero3.sharding.layouts.layout import Layout
from deepcompile_zero3.sharding.module_parameters import parameters_of
from deepcompile_zero3.transport import json_collectives

each_transport = pytest.mark.parametrize("transport", ["shared_memory", "c10d"])


def _no_memory(patch, at):
    shard_of = Layout.shard
    calls = iter(range(100))

    def fail(layout, parameter):
        if next(calls) == at:
            raise MemoryError("no memory for a shard")
        return shard_of(layout, parameter)

    patch.setattr(Layout, "shard", fail)


def _fail_on_one(transport):
    model = Stack()
    shard(model.blocks[0], transport=transport)
    before = dict(model.named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            _no_memory(patch, at=2)
            with pytest.raises(MemoryError, match="no memory for a shard"):
                fully_shard(model, transport=transport)
        else:
            told = "failed on rank 1: MemoryError: no memory for a shard. Nothing is sharded"
            with pytest.raises(Zero3Error, match=told):
                fully_shard(model, transport=transport)

    assert type(model) is Stack
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {isinstance(p, DTensor) for p in model.blocks[1].parameters()} == {False}


@each_transport
def test_a_failure_on_one_rank_leaves_all_as_they_were(run_ranks, transport):
    run_ranks(2, _fail_on_one, transport)


def _fail_on_one_of_four(kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("columns", "rows"))
    model = Stack()
    match kind:
        case "replicas":
            over = mesh
        case "tensor parallel":
            model = parallelize_module(model, mesh["rows"], {"head": ColwiseParallel()})
            over = mesh["columns"]
        case "blocks over another mesh":
            fully_shard(model.blocks[0], mesh=mesh["rows"])
            over = mesh["columns"]
    policy = "bf16" if dist.get_rank() == 0 else MixedPrecisionPolicy()
    with pytest.raises((TypeError, Zero3Error), match="mp_policy must be"):
        fully_shard(model, mesh=over, mp_policy=policy)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            _no_memory(patch, at=0)
        with pytest.raises((MemoryError, Zero3Error), match="no memory for a shard"):
            fully_shard(model, mesh=over)
    assert type(model) is Stack


@pytest.mark.parametrize(
    "kind",
    [
        "replicas",
        "tensor parallel",
        pytest.param("blocks over another mesh", marks=pytest.mark.more),
    ],
)
def test_a_failure_on_one_rank_is_an_error_on_all_of_the_model(run_ranks, kind):
    run_ranks(4, _fail_on_one_of_four, kind)


def _keeps_a_reference(model):
    model.head.kept = [model.head.weight]


def _has_no_forward(model):
    model.forward = nn.Module().forward


BAD = {
    "policy": ({"mp_policy": "bf16"}, None, "TypeError: mp_policy must be"),
    "transport": ({"transport": "smoke signals"}, None, "ValueError: transport"),
    "reshard": ({"reshard_after_forward": 3}, None, "ValueError: reshard_after_forward is"),
    "ignored": ({"ignored_params": [3]}, None, "TypeError: ignored_params is"),
    "placement": ({"shard_placement_fn": lambda p: 3}, None, "TypeError: shard_placement_fn"),
    "offload": ({"offload_policy": 3}, None, "NotImplementedError: fully_shard does not"),
    "reference": ({}, _keeps_a_reference, "Zero3Error: 'head'.* keeps a second reference"),
    "forward": ({}, _has_no_forward, "Zero3Error: a Stack has no forward"),
}


def _bad_on_one(transport):
    for bad, change, told in BAD.values():
        model = Stack()
        given = {"transport": transport}
        if dist.get_rank() == 1:
            given |= bad
            if change is not None:
                change(model)
            told = told.partition(": ")[2]
            expected = (TypeError, ValueError, NotImplementedError, Zero3Error)
        else:
            expected, told = Zero3Error, rf"failed on rank 1: {told}.*Nothing is sharded"
        with pytest.raises(expected, match=told):
            fully_shard(model, **given)
        assert type(model) is Stack
    model, reference = shard(Stack(), transport=transport)
    assert_same_step(model, reference, batch_of(4, 8))


@each_transport
def test_what_one_rank_alone_refuses_is_told_to_the_others(run_ranks, transport):
    run_ranks(2, _bad_on_one, transport)


def _fail_then_train(transport):
    model = Stack()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            _no_memory(patch, at=2)
        with pytest.raises((MemoryError, Zero3Error)):
            fully_shard(model, transport=transport)
    model, reference = shard(model, model.blocks, transport=transport)
    optimizers = optimizers_of(model, reference)
    for run in (model, compiled(model, "interpreted")):
        assert_same_step(model, reference, batch_of(4, 8), run=run, optimizers=optimizers)


@each_transport
def test_a_call_after_one_that_failed_is_right(run_ranks, transport):
    run_ranks(2, _fail_then_train, transport)


def _collected_on_one_rank(transport, how):
    """Handles a model that is freed on one rank but still uncollected on the other."""
    gc.disable()
    try:
        first, _ = shard(Stack(), transport=transport)
        mean_square(first, mine(batch_of(4, 8))).backward()
        first.__dict__["itself"] = first
        del first
        if dist.get_rank() == 0:
            gc.collect()
        model, reference = shard(Stack(), transport=transport)
        run = compiled(model, how)
        assert_same_step(model, reference, batch_of(4, 8), run=run)
        return [p.fqn for m in model.modules() for p in parameters_of(m).values()]
    finally:
        gc.enable()


@each_transport
@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_a_model_has_one_name_whatever_was_collected(run_apart, transport, how):
    one, other = run_apart(_collected_on_one_rank, transport, how)
    assert one == other
    assert all(name.startswith("Stack:2.") for name in one)


def _exchanged():
    """Returns the numbers of characters that ranks exchange to find out whether they agree."""
    sent, gather = [], json_collectives.all_gather_json

    def noted(what, value, group):
        sent.append(len(json.dumps(value)))
        return gather(what, value, group)

    described = ["a parameter"] * 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_collectives, "all_gather_json", noted)
        json_collectives.check_all_alike("a test", described, dist.group.WORLD, remedy="")
        described[999] = f"another on {dist.get_rank()}"
        with pytest.raises(Zero3Error, match=r"parameter 999: it is another .*; take the same"):
            json_collectives.check_all_alike(
                "a test", described, dist.group.WORLD, remedy="take the same"
            )
    return sent


def test_ranks_exchange_descriptions_only_if_they_differ(run_ranks):
    for alike, different, texts in run_ranks(2, _exchanged):
        assert alike == different < 100 < texts


def _agree_on_meta():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_internals, "device_of_objects", lambda group: torch.device("meta"))
        with pytest.raises(Zero3Error, match=r"could not tell each other .* meta tensor"):
            fully_shard(Stack())


def test_ranks_agree_on_the_device_that_torch_names_for_the_group(run_ranks):
    """A group may have several backends: "cpu:gloo,cuda:nccl" exchanges objects on GPUs."""
    run_ranks(2, _agree_on_meta)
