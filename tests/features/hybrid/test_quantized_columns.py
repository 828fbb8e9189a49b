"""Replicas that gather each other's parts in one byte an element."""

import pytest
import torch
from support.mesh_models import either_way, replicas
from support.models import Stack, batch_of, compiled, mine, shard

from deepcompile_zero3 import (
    Zero3Error,
    fully_shard,
    quantize_replica_gathers,
    record_collectives,
)


def _quantized(how, dtype):
    model = Stack(width=128, depth=1)
    settings = {"mesh": replicas(), "shard_optimizer_over_replicas": True}
    model, reference = shard(model, model.blocks, **settings)
    quantize_replica_gathers(model, dtype)
    run = compiled(model, how)
    with torch.no_grad():  # of what a rank computes with
        for name, whole in reference.named_parameters():
            assert name in dict(model.named_parameters())
            if whole.dim() == 2:
                scale = whole.view(-1, 128).abs().amax(1, keepdim=True) / 127
                whole.copy_(((whole.view(-1, 128) / scale).round() * scale).view_as(whole))
    nbytes = []
    for _ in range(2):
        with record_collectives() as log:
            output = run(mine(batch_of(4, 128)))
        nbytes.append(sum(c.nbytes for c in log if c.op == "all_gather" and c.world_size == 2))
        torch.testing.assert_close(output, mine(reference(batch_of(4, 128))))
    matrices = (128 * 128 + 2 * 128 * 256) // 128  # rows of 128 elements
    vectors = 128 + 128 + 128 + 256 + 128
    assert nbytes == [matrices * (128 + 4) + 4 * vectors, 0]
    output.square().mean().backward()
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(not torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters())

    quantize_replica_gathers(model, None)
    with record_collectives() as log:
        run(mine(batch_of(4, 128)))
    columns = [c.nbytes for c in log if c.op == "all_gather" and c.world_size == 2]
    assert sum(columns) == 4 * (128 * matrices + vectors)


@either_way
def test_parts_travel_in_one_byte_and_all_replicas_compute_with_the_same(run_ranks, how):
    run_ranks(2, _quantized, how, torch.int8)


def _refused():
    model = fully_shard(Stack(), mesh=replicas())
    with pytest.raises(Zero3Error, match="shard_optimizer_over_replicas=True"):
        quantize_replica_gathers(model, torch.int8)


def test_a_model_without_parts_is_refused(run_ranks):
    run_ranks(2, _refused)


def _converted():
    model = Stack(width=128, depth=1)
    fully_shard(model, mesh=replicas(), shard_optimizer_over_replicas=True)
    quantize_replica_gathers(model, torch.int8)
    model.to(torch.bfloat16)
    with record_collectives() as log:
        model(batch_of(4, 128).bfloat16())
    return {c.dtype for c in log if c.op == "all_gather" and c.world_size == 2}


def test_a_model_that_is_converted_stays_quantized(run_ranks):
    for dtypes in run_ranks(2, _converted):
        assert dtypes == {torch.uint8, torch.bfloat16}  # matrices, and vectors as they are
