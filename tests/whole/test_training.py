"""Events during and between steps: the model trains on like one process."""

import os
from collections import Counter

import pytest
import torch
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    assert_same_steps,
    batch_of,
    call_in_backward,
    compiled,
    compiled_each_way,
    each_way,
    mean_square,
    mine,
    optimizers_of,
    shard,
    shard_stack,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import capture_graphs, record_collectives


def _assert_reads_are_sharded(model):
    assert isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[0].up.weight, DTensor)


# ---- how a step is run


def _alternate():
    model, reference = shard_stack()
    optimizers = optimizers_of(model, reference)
    runs = [compiled(model, how) for how in ("zero3", "eager", "inductor", "interpreted")]
    for seed, run in enumerate(2 * runs):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@pytest.mark.inductor
def test_zero3_and_eager_and_inductor_steps_may_alternate(run_ranks):
    run_ranks(2, _alternate)


class _PartlyCompiled(Stack):
    def forward(self, x):
        x = torch.compiler.disable(self.blocks[0])(x)
        return self.head(self.blocks[1](x))


def _disabled_submodule(how):
    model = _PartlyCompiled()
    model, reference = shard(model, model.blocks)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    with capture_graphs() as graphs:
        for seed in range(2):
            batch = batch_of(4, 8, seed=seed)
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    text = "".join(graph.text for graph in graphs.forward)
    assert "blocks_1_up_weight" in text
    assert "blocks_0_up_weight" not in text


@compiled_each_way
def test_a_submodule_may_be_disabled_for_the_compiler(run_ranks, how):
    run_ranks(2, _disabled_submodule, how)


@torch.compiler.disable
def _kernel(x, weight, bias):
    return nn.functional.linear(x, weight, bias)


class _OfAKernel(nn.Linear):
    """A layer that passes its parameters, of one bucket, to a function that is not compiled."""

    def forward(self, x):
        return _kernel(x.tanh(), self.weight, self.bias)


def _disabled_function(how):
    model, reference = shard(_OfAKernel(8, 8))
    assert_same_steps(model, reference, how, 4, 8)


@compiled_each_way
def test_parameters_may_go_to_a_function_that_is_not_compiled(run_ranks, how):
    run_ranks(2, _disabled_function, how)


def _evaluate(how, mode):
    model, reference = shard_stack()
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        with mode():
            torch.testing.assert_close(run(batch), reference(batch))


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_sees_the_trained_model(run_ranks, how, mode):
    run_ranks(2, _evaluate, how, mode)


def _unused_forward(how):
    model, reference = shard_stack()
    run = compiled(model, how)
    for seed in range(2):
        run(batch_of(2, 8))  # gradients enabled, but no backward
        assert_same_step(model, reference, batch_of(4, 8, seed=seed), run=run)


@each_way
def test_a_forward_without_backward_changes_nothing(run_ranks, how):
    run_ranks(2, _unused_forward, how)


def _gradients_of_inputs(how):
    model, reference = shard_stack()
    run = compiled(model, how)
    batch = batch_of(4, 8)
    for _ in range(2):
        ours, theirs = mine(batch).requires_grad_(), mine(batch).clone().requires_grad_()
        expected = torch.autograd.grad(mean_square(reference, theirs), theirs)
        torch.testing.assert_close(torch.autograd.grad(mean_square(run, ours), ours), expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert_same_step(model, reference, batch, run=run)
        for m in (model, reference):
            m.zero_grad()


@each_way
def test_gradients_of_inputs_alone_leave_those_of_parameters_alone(run_ranks, how):
    run_ranks(2, _gradients_of_inputs, how)


# ---- errors


class _Raising(Stack):
    """A stack that raises between its blocks on request."""

    raises = None

    def raise_in(self, where):
        if self.raises == where:
            raise RuntimeError(f"raised in {where}")

    @torch.compiler.disable
    def trap(self, x):
        self.raise_in("forward")
        return call_in_backward(x, lambda: self.raise_in("backward"))

    def forward(self, x):
        first, last = self.blocks
        return self.head(last(self.trap(first(x))))


def _raise(how, where):
    model = _Raising()
    model, reference = shard(model, model.blocks)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        model.raises = where
        try:
            mean_square(run, mine(batch)).backward()
        except RuntimeError as error:
            assert f"raised in {where}" in str(error)  # noqa: PT017 (pytest is not here)
        else:
            raise AssertionError("nothing was raised")
        model.raises = None
        model.zero_grad()
        _assert_reads_are_sharded(model)


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_raises_leaves_the_next_one_right(run_ranks, how, where):
    run_ranks(2, _raise, how, where)


# ---- gathered for longer, or again


def _unshard():
    model, reference = shard_stack()
    layer, whole = model.blocks[0].up, reference.blocks[0].up
    model.blocks[0].unshard()
    assert not isinstance(layer.weight, DTensor)
    assert torch.equal(layer.weight, whole.weight)
    assert isinstance(model.head.weight, DTensor)  # in another group
    layer.weight.square().sum().backward()
    model.blocks[0].reshard()
    whole.weight.square().sum().backward()
    assert_same_gradients(model, reference)
    _assert_reads_are_sharded(model)
    assert_same_step(model, reference, batch_of(4, 8))


def test_weights_are_whole_between_unshard_and_reshard(run_ranks):
    run_ranks(2, _unshard)


def _count_collectives(how):
    """Returns how often a step gathers and reduces each parameter, by ``reshard_after_forward``."""
    layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
    model, reference = shard(nn.Sequential(*layers), layers[::2])
    run = compiled(model, how)
    counts = {}
    for seed, reshard in enumerate([True, False, True]):
        model.set_reshard_after_forward(reshard)
        with record_collectives() as log:
            assert_same_step(model, reference, batch_of(4, 8, seed=seed), run=run)
        counts[reshard] = {
            op: Counter(fqn for c in log if c.op == op for fqn in c.params)
            for op in ("all_gather", "reduce_scatter")
        }
    return counts


@each_way
def test_parameters_are_gathered_again_only_if_resharded_after_forward(run_ranks, how):
    every = Counter(["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"])
    again = every
    if how == "eager":  # saved weights, or all of a group: the input needs no gradient
        again = Counter(["2.weight", "4.weight"])
        if os.environ.get("ZERO3_TRANSPORT") == "c10d":
            again += Counter(["2.bias", "4.bias"])
    for counts in run_ranks(2, _count_collectives, how):
        assert counts == {
            True: {"all_gather": every + again, "reduce_scatter": every},
            False: {"all_gather": every, "reduce_scatter": every},
        }


# ---- several models, several groups


def _two_models(how):
    one, one_reference = shard_stack(depth=1)
    two, two_reference = shard_stack(depth=1)
    runs = [compiled(model, how) for model in (one, two)]
    batch = batch_of(4, 8)

    with record_collectives() as log:
        losses = [mean_square(run, mine(batch)) for run in runs]
        for loss in losses:
            loss.backward()
    for reference in (one_reference, two_reference):
        mean_square(reference, batch).backward()
    assert_same_gradients(one, one_reference)
    assert_same_gradients(two, two_reference)
    reduced = [fqn for c in log if c.op == "reduce_scatter" for fqn in c.params]
    assert len(set(reduced)) == len(reduced) == 2 * len(list(one.parameters()))

    def chained(first, second):
        return lambda x: second(first(x))

    mean_square(chained(*runs), mine(batch)).backward()
    mean_square(chained(one_reference, two_reference), batch).backward()
    assert_same_gradients(one, one_reference)
    assert_same_gradients(two, two_reference)


@each_way
def test_two_models_live_side_by_side(run_ranks, how):
    run_ranks(2, _two_models, how)


def _pairs_of_ranks(how):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))
    pair, group = mesh.get_local_rank("pair"), mesh.get_group("shard")
    torch.manual_seed(pair)
    model, reference = shard_stack(depth=1, mesh=mesh["shard"])
    run = compiled(model, how)
    for seed in (pair, 2 + pair):
        batch = batch_of(4, 8, seed=seed)
        mean_square(run, mine(batch, group)).backward()
        mean_square(reference, batch).backward()
        assert_same_gradients(model, reference)


@each_way
def test_two_process_groups_train_a_model_each(run_ranks, how):
    run_ranks(4, _pairs_of_ranks, how)
