"""What a training step refuses, by the name of the parameter."""

import copy

import pytest
import torch
from support.extensions import Bf16Gathered, wrap
from support.models import batch_of, compiled, each_way
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrizations

from deepcompile_zero3 import Zero3Error, fully_shard, step_locally

pytestmark = pytest.mark.usefixtures("one_rank")


@each_way
def test_a_gradient_cannot_be_differentiated_again(how):
    model = fully_shard(nn.Linear(4, 4))
    loss = compiled(model, how)(batch_of(2, 4)).square().sum()
    with pytest.raises(Zero3Error, match=r"gradient of '.*(weight|bias)' cannot be differ"):
        loss.backward(create_graph=True)
    assert model.weight.grad is None


@each_way
def test_that_of_an_input_can(how):
    model = fully_shard(nn.Linear(4, 4))
    x = batch_of(2, 4).requires_grad_()
    [grad] = torch.autograd.grad(compiled(model, how)(x).tanh().sum(), x, create_graph=True)
    assert grad.requires_grad
    assert model.weight.grad is None


@pytest.mark.parametrize(
    "change",
    [parametrizations.weight_norm, lambda layer: delattr(layer, "weight")],
    ids=["parametrize", "delete"],
)
@each_way
def test_a_parameter_cannot_be_removed(how, change):
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))

    def change_and_run():
        change(model[0])  # may raise too
        compiled(model, how)(batch_of(2, 4))

    with pytest.raises(Exception, match=r"0\.weight' was removed after fully_shard"):
        change_and_run()


@pytest.mark.parametrize(
    ("grad_of", "found"),
    [
        (lambda parameter: torch.zeros(4, 4), "a plain tensor"),
        (
            lambda parameter: distribute_tensor(torch.zeros(4, 4), parameter.device_mesh),
            "Replicate",
        ),
    ],
    ids=["plain", "replicated"],
)
@each_way
def test_a_gradient_of_another_placement_is_refused_before_any_is_added(how, grad_of, found):
    model = fully_shard(nn.Linear(4, 4))
    model.weight.grad = grad_of(model.weight)
    loss = compiled(model, how)(batch_of(2, 4)).sum()
    with pytest.raises(Zero3Error, match=rf"the \.grad of '.*weight' is .*{found}"):
        loss.backward()
    assert model.bias.grad is None


class _Broken(Bf16Gathered):
    def fsdp_post_all_gather(self, *args, out=None, **kwargs):
        return self.no_such_attribute


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("already_ran", [False, True], ids=["before the first step", "later"])
@each_way
def test_a_shard_of_other_rows_cannot_replace_one(how, already_ran, rows):
    model = fully_shard(nn.Linear(4, 4, bias=False))
    run, x = compiled(model, how), batch_of(2, 4)
    if already_ran:
        run(x).sum().backward()
    mesh, placements = model.weight.device_mesh, model.weight.placements
    local = torch.ones(rows, 4)
    wrong = DTensor.from_local(local, mesh, placements, shape=torch.Size([4, 4]), stride=(4, 1))
    model.weight = nn.Parameter(wrong)
    found = rf"shard of '.*weight' has shape \[4, 4\] and was replaced by .* \[{rows}, 4\]"
    with pytest.raises(Zero3Error, match=found):
        run(x)


def test_an_attribute_that_is_missing_while_a_parameter_is_read_is_told():
    model = nn.Linear(4, 4)
    wrap(model, _Broken)
    fully_shard(model)
    with pytest.raises(Zero3Error, match=r"reading '.*weight' failed: .*no_such_attribute"):
        model(batch_of(2, 4))


def _stepped_from_before(is_local, keeps=()):
    """Takes a step with an optimizer that was built before ``fully_shard``."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fully_shard(model, ignored_params={model.get_parameter(fqn) for fqn in keeps})
    if is_local:
        step_locally(optimizer)
    optimizer.step()  # without gradients it does nothing
    model(batch_of(2, 4)).sum().backward()
    return model, optimizer


@pytest.mark.parametrize("is_local", [False, True])
def test_an_optimizer_from_before_sharding_is_refused_by_the_names_of_its_parameters(is_local):
    model, optimizer = _stepped_from_before(is_local, keeps=["0.bias"])
    told = r"the AdamW has '0.weight' and 2 others from before fully_shard.*Build the optimizer af"
    with pytest.raises(Zero3Error, match=told):
        optimizer.step()
    torch.optim.AdamW(model.parameters()).step()
    del model
    optimizer.step()


@pytest.mark.parametrize("is_local", [False, True])
def test_an_optimizer_may_have_parameters_from_before_sharding_beside_others(is_local):
    model, optimizer = _stepped_from_before(is_local)
    optimizer.add_param_group({"params": list(model.parameters())})
    optimizer.step()  # of the shards


@pytest.mark.parametrize("is_local", [False, True])
def test_a_parameter_that_was_replaced_may_be_trained_elsewhere(is_local):
    model, unsharded = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    unsharded.weight = model.weight
    optimizer = torch.optim.AdamW([*unsharded.parameters(), *copy.deepcopy(model).parameters()])
    if is_local:
        step_locally(optimizer)
    fully_shard(model)
    for each in (model, unsharded):
        each(batch_of(2, 4)).sum().backward()
    optimizer.step()
