"""Parts together with other features: checkpoints, optimizers, norms, streams, digests, errors."""

import copy
import functools
import re
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.mesh_models import either_way, replicas
from support.models import Stack, batch_of, compiled, mine, optimizers_of, step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from deepcompile_zero3 import (
    FileOffloadPolicy,
    MatrixOwners,
    Zero3Error,
    clip_grad_norm_,
    explain,
    fully_shard,
    plan,
    step_in_backward,
    step_locally,
    stream_full_parameters,
    training_digest,
)


def stack(layout):
    """Returns a sharded Stack, with one seed, by the name of a layout."""
    torch.manual_seed(0)
    model = Stack()
    settings = {
        "parts": {"mesh": replicas(), "shard_optimizer_over_replicas": True},
        "replicas": {"mesh": replicas()},
        "shards": {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))},
    }[layout]
    for module in (*model.blocks, model):
        fully_shard(module, **settings)
    return model


def train(model, optimizer, seeds, how="eager", clip=False):
    """Takes a step for each seed; returns the losses."""
    run = compiled(model, how)
    losses = []
    for seed in seeds:
        loss = run(mine(batch_of(8, 8, seed=seed))).square().mean()
        loss.backward()
        if clip:
            clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _resumed(folder, before, after):
    model = stack(before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    expected = train(model, optimizer, range(2, 4))

    model = stack(after)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert train(model, optimizer, range(2, 4)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("parts", "parts"),
        ("parts", "shards"),
        pytest.param("replicas", "parts", marks=pytest.mark.more),
        pytest.param("parts", "replicas", marks=pytest.mark.more),
    ],
)
def test_a_checkpoint_resumes_in_another_layout(run_ranks, tmp_path, before, after):
    run_ranks(4, _resumed, str(tmp_path), before, after)


def _continued(folder, before):
    """Takes two steps, saves, and takes two more, after which it returns the full parameters.

    Or, with ``before`` None, loads on one process that shards nothing, and takes the two steps.
    """
    torch.manual_seed(0)
    model = Stack() if before is None else stack(before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if before is not None:
        train(model, optimizer, range(2))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if before is not None:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    train(model, optimizer, range(2, 4))
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def test_a_checkpoint_of_parts_resumes_on_one_process(run_ranks, tmp_path):
    saved, *_ = run_ranks(4, _continued, str(tmp_path), "parts")
    for one, parts in zip(*run_ranks(1, _continued, str(tmp_path), None), saved, strict=True):
        torch.testing.assert_close(one, parts)


def _steps(how, wrap, clip):
    models = [stack(layout) for layout in ("replicas", "parts")]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    if wrap is not None:
        for model, optimizer in zip(models, optimizers, strict=True):
            wrap(model, optimizer)
    whole, parts = (
        train(m, o, range(3), how, clip) for m, o in zip(models, optimizers, strict=True)
    )
    assert parts == pytest.approx(whole, rel=1e-5)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.full_tensor())


def locally(_, optimizer):
    step_locally(optimizer)


@either_way
@pytest.mark.thin
@pytest.mark.parametrize(
    ("wrap", "clip"),
    [(None, True), (locally, True), (step_in_backward, False)],
    ids=["clip", "local", "in-backward"],
)
def test_optimizers_step_parts(run_ranks, how, wrap, clip):
    run_ranks(4, _steps, how, wrap, clip)


def _owned():
    torch.manual_seed(0)
    model = Stack()
    reference = copy.deepcopy(model)
    owners = MatrixOwners(model, replicas())
    for module in (*model.blocks, model):
        fully_shard(
            module,
            mesh=replicas(),
            shard_placement_fn=owners,
            shard_optimizer_over_replicas=True,
        )
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(8, 8, seed=seed)
        model(mine(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
        step(optimizers)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other)


def test_a_matrix_that_one_rank_owns_stays_whole(run_ranks):
    run_ranks(4, _owned)


def _full_values():
    model = stack("parts")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    for name, tensor in stream_full_parameters(model, max_mb=1):
        assert torch.equal(tensor, full[name])
    other = stack("shards")
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(
                distribute_tensor(full[name], parameter.device_mesh, parameter.placements)
            )
    assert training_digest(model) == training_digest(other)


def test_streams_and_digests_know_parts(run_ranks):
    run_ranks(4, _full_values)


def _refused(what):
    model, mesh = Stack(depth=1), replicas()
    settings = {"mesh": mesh, "shard_optimizer_over_replicas": True}
    if what == "one dimension":
        settings["mesh"] = init_device_mesh("cpu", (2,))
    if what == "file":
        settings["offload_policy"] = FileOffloadPolicy(tempfile.gettempdir())
    if what == "ranks differ":
        settings["shard_optimizer_over_replicas"] = dist.get_rank() == 0
    before = [type(p) for p in model.parameters()]
    with pytest.raises((ValueError, NotImplementedError, Zero3Error)) as raised:
        fully_shard(model, **settings)
    assert [type(p) for p in model.parameters()] == before
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("one dimension", r"needs a mesh \[replicate, shard\]"),
        ("file", "does not support offload_policy"),
        ("ranks differ", "in parts over replicas"),
    ],
)
def test_what_cannot_be_is_refused_by_name(run_ranks, what, told):
    for message in run_ranks(2, _refused, what):
        assert re.search(told, message), message


def _explained():
    model = stack("parts")
    explain(model, batch_of(4, 8))  # sends nothing
    report = explain(model, batch_of(4, 8))
    assert "14 parameters" in str(report)
    train(model, torch.optim.AdamW(model.parameters()), range(1))


@pytest.mark.more
def test_a_step_is_explained_before_anything_was_gathered(run_ranks):
    run_ranks(2, _explained)


def test_a_plan_counts_the_states_of_parts():
    def shard(is_divided, model, mesh):
        fully_shard(model, mesh=mesh, shard_optimizer_over_replicas=is_divided)

    def loss_of(depth):
        model = Stack(width=64, depth=depth)
        model.register_forward_hook(lambda module, args, output: (output.square().mean(),))
        return model

    whole, parts = (
        plan(
            functools.partial(loss_of, 2),
            {"x": torch.zeros(4, 64)},
            world_size=4,
            replicas=2,
            shard=functools.partial(shard, is_divided),
            advise=False,
        ).memory
        for is_divided in (False, True)
    )
    assert 2 * parts["optimizer"] == whole["optimizer"]
    assert parts["shards"] == 1.5 * whole["shards"]  # each rank keeps what it computes from, too
