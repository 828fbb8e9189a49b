"""What the scenarios of FSDP2's tests share."""

import pytest
from one_rank import one_rank  # noqa: F401

needs_a_job = pytest.mark.usefixtures("one_rank")


def fqns(log, op):
    return [fqn for c in log if c.op == op for fqn in c.params]


def step(optimizers, set_to_none=True):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
