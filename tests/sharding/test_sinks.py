"""Sinks and checks of reduced gradients: what features may do with them."""

import torch
from support.job import needs_a_job
from torch import nn

from deepcompile_zero3 import fully_shard, step_in_backward
from deepcompile_zero3.sharding.module_parameters import all_parameters_of


@needs_a_job
def test_a_check_sees_all_gradients_before_a_sink_takes_them():
    model = fully_shard(nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_in_backward(model, optimizer)
    seen = []

    def note(reduced):
        seen.extend(parameter.fqn for parameter, _ in reduced)
        assert all(parameter.shard.grad is None for parameter, _ in reduced)
        return ""

    parameters = all_parameters_of(model, "test")
    for parameter in parameters:
        parameter.checks["note"] = note
        parameter.deliver_early_if_possible()
    before = [parameter.shard.full_tensor().clone() for parameter in parameters]
    model(torch.ones(2, 4)).square().sum().backward()
    assert sorted(seen) == sorted(parameter.fqn for parameter in parameters)
    for parameter, value in zip(parameters, before, strict=True):
        assert parameter.shard.grad is None
        assert not torch.equal(parameter.shard.full_tensor(), value)
