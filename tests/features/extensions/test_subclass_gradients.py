"""Gradients that are tensor subclasses of several inner tensors."""

import copy
import operator

import pytest
import torch
from support.models import batch_of, compiled, compiled_each_way, either_transport, mine
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_map_only

from deepcompile_zero3 import fully_shard


class Pair(torch.Tensor):
    """Two tensors, on both of which each operator runs."""

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(
            cls, left.shape, strides=left.stride(), dtype=left.dtype, device=left.device
        )

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __tensor_flatten__(self):
        return ["left", "right"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        lefts, rights = (
            func(*of[0], **of[1])
            for name in ("left", "right")
            for of in [tree_map_only(Pair, operator.attrgetter(name), (args, kwargs or {}))]
        )
        if func.overloadpacket.__name__.endswith("_"):
            return args[0]
        if not isinstance(lefts, torch.Tensor):
            return [Pair(left, right) for left, right in zip(lefts, rights, strict=True)]
        return Pair(lefts, rights)

    def fsdp_pre_all_gather(self, mesh):
        return (self.left, self.right), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return Pair(*outputs), outputs


class Activations(nn.Module):
    """Reads a plain parameter and one that is a pair, with an input that may be a pair."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        # The gradient of the second sum is expanded: all of its elements are one in memory.
        return self.last(self.first(x)).sum() + self.last.weight.sum() * x.shape[0]


def _make_pairs(model):
    for layer in (model.first, model.last):
        weight = layer.weight.detach()
        layer.weight = nn.Parameter(Pair(weight.clone(), weight.clone()))


def _pairs(transport, of_weights):
    torch.manual_seed(0)
    model = Activations()
    reference = copy.deepcopy(model)
    if of_weights:
        _make_pairs(model)
    for layer in (model.first, model.last):
        fully_shard(layer, transport=transport)
    fully_shard(model, transport=transport)
    batch = batch_of(4, 8)
    for _ in range(2):
        x = mine(batch)
        model(x if of_weights else Pair(x, x.clone())).backward()
        reference(batch).backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = sharded.grad.full_tensor()
        assert type(gradient) is torch.Tensor
        torch.testing.assert_close(gradient, whole.grad / torch.distributed.get_world_size())


@either_transport
@pytest.mark.parametrize("of_weights", [True, False], ids=["weights", "input"])
def test_a_gradient_of_several_inner_tensors_counts_once(run_ranks, transport, of_weights):
    run_ranks(2, _pairs, transport, of_weights)


def _pairs_in_a_graph(how, of_weights):
    model = Activations()
    if of_weights:
        _make_pairs(model)
    fully_shard(model)
    x = mine(batch_of(4, 8))
    refused = r"gradient of '(first|last).weight' is a tensor subclass"
    with pytest.raises(BackendCompilerFailed, match=refused):
        compiled(model, how)(x if of_weights else Pair(x, x.clone())).backward()


@compiled_each_way
@pytest.mark.parametrize("of_weights", [True, False], ids=["weights", "input"])
def test_a_graph_whose_gradient_is_a_subclass_is_refused(run_ranks, how, of_weights):
    run_ranks(2, _pairs_in_a_graph, how, of_weights)
