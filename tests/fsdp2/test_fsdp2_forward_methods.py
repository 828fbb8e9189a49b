"""Methods that are registered as forwards: they gather and cast as a forward does."""

import pytest
import torch
from support.job import needs_a_job
from support.models import (
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    gathered_fqns,
    mine,
    shard,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import (
    register_fsdp_forward_method as torch_register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_pytree_node

from deepcompile_zero3 import fully_shard, register_fsdp_forward_method


class Encoder(nn.Module):
    """A module with two entry points."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.encode(x))

    def encode(self, x, fails=False):
        if fails:
            raise KeyError("as asked for")
        return torch.tanh(x @ self.up.weight.t())  # a parameter of its own child


def _another_way_in(how, register):
    policy = MixedPrecisionPolicy(param_dtype=torch.float64)
    model, reference = shard(Encoder(), mp_policy=policy)
    register(model, "encode")
    assert model.encode.__name__ == "encode"
    encode = compiled(model.encode, how)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        output = encode(mine(batch))
        assert output.dtype == torch.float64
        output.square().mean().backward()
        reference.encode(batch).square().mean().backward()
    assert model.down.weight.grad is None
    assert_same_gradients(model, reference)
    with pytest.raises(KeyError):
        model.encode(mine(batch), fails=True)
    assert gathered_fqns(model) == [] or register is torch_register_fsdp_forward_method
    assert_same_step(model, reference, batch)
    assert gathered_fqns(model) == []


@each_way
def test_a_registered_method_is_a_forward(run_ranks, how):
    run_ranks(2, _another_way_in, how, register_fsdp_forward_method)


def test_a_method_that_torch_registers_is_a_forward(run_ranks):
    run_ranks(2, _another_way_in, "eager", torch_register_fsdp_forward_method)


@needs_a_job
def test_a_method_can_be_registered_whether_or_not_its_module_is_sharded():
    model = Encoder()
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model, "decode")
    fully_shard(model)
    with pytest.raises(ValueError, match="FSDPEncoder has no method 'decode'"):
        register_fsdp_forward_method(model, "decode")


class Single:
    """An input that is of single precision."""

    def __init__(self, x):
        self.x = x
        if x.dtype != torch.float32:
            raise ValueError(f"a Single of {x.dtype}")


register_pytree_node(Single, lambda single: ([single.x], None), lambda values, _: Single(*values))


@needs_a_job
def test_a_registered_method_whose_inputs_cannot_be_cast_leaves_no_forward_open():
    model = fully_shard(Encoder(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    register_fsdp_forward_method(model, "encode")
    with pytest.raises(ValueError, match=r"a Single of torch\.float64"):
        model.encode(Single(batch_of(2, 8)))
    assert isinstance(model.up.weight, DTensor)
    assert model.encode(batch_of(2, 8)).dtype == torch.float64
