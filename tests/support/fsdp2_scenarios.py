"""Shared parts of the scenarios of FSDP2's tests."""


def fqns(log, op):
    return [fqn for c in log if c.op == op for fqn in c.params]


def step(optimizers, set_to_none=True):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
