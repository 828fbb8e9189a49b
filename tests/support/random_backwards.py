"""Random backwards whose gradients are small integers, with sums that are exact in every dtype."""

import random

import pytest
import torch
import torch.distributed as dist
from support.models import call_in_backward
from torch import nn

from deepcompile_zero3 import MixedPrecisionPolicy, fully_shard

PER_MODEL = 100
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def _fail():
    raise ZeroDivisionError


class Parameters(nn.Module):
    """A few parameters of random sizes and dtypes; the forward sums products with constants."""

    def __init__(self, random):
        super().__init__()
        self.parameters_ = nn.ParameterList()
        for _ in range(random.randint(1, 6)):
            # Most are sent together; parameters from 64 KiB a rank on are sent alone.
            shape = random.choice([(1, 3), (2, 1), (5, 4), (33,), (7, 2, 3), (64, 40)])
            if random.random() < 0.1:
                shape = (random.randint(600, 700), 64)
            values = torch.zeros(shape, dtype=random.choice(DTYPES))
            self.parameters_.append(nn.Parameter(values))

    def forward(self, terms):
        """``terms`` are pairs of a parameter's number and a constant, or None and an action."""
        products = []
        for index, what in terms:
            if index is None:
                products.append(call_in_backward(torch.zeros((), requires_grad=True), what))
            else:
                products.append((self.parameters_[index] * what).sum().double())
        return sum(products)


def sharded(random, **settings):
    model = Parameters(random)
    policy = MixedPrecisionPolicy(reduce_dtype=random.choice([None, *DTYPES]))
    fully_shard(model, mp_policy=policy, **settings).set_reduce_scatter_unused_params(True)
    return model


def _constant(parameter, seed):
    numbers = torch.randint(-8, 9, parameter.shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(parameter.dtype)


def draw(random, model, raises):
    """Draws the terms of each rank, in one order; some ranks lack some parameters."""
    order = [i for i in range(len(model.parameters_)) if random.random() < 0.8]
    absent = {i: random.randrange(dist.get_world_size()) for i in order if random.random() < 0.1}
    if raises:  # gradients that some ranks lack are sent at other places, maybe never
        absent = {}
    order += [i for i in order if random.random() < 0.1]  # used twice
    random.shuffle(order)
    if raises:
        order.insert(random.randrange(len(order) + 1), None)
    terms = [[] for _ in range(dist.get_world_size())]
    for index in order:
        for rank, of_rank in enumerate(terms):
            if index is None:
                of_rank.append((None, _fail))
            elif rank != absent.get(index):
                parameter = model.parameters_[index]
                of_rank.append((index, _constant(parameter, random.getrandbits(30))))
    # A rank that uses no parameter does not take part in a backward.
    has_some = (any(index is not None for index, _ in of_rank) for of_rank in terms)
    return terms if all(has_some) else draw(random, model, raises)


def _expected(terms, index):
    """Returns the mean of the ranks' gradients, or None if no rank has one."""
    constants = [constant for of_rank in terms for i, constant in of_rank if i == index]
    return sum(c.double() for c in constants) / len(terms) if constants else None


def check(model, terms):
    for index, parameter in enumerate(model.parameters_):
        expected = _expected(terms, index)
        if expected is None:
            assert parameter.grad is None
            continue
        assert parameter.grad.dtype == parameter.dtype
        rows, rank = -(-parameter.shape[0] // dist.get_world_size()), dist.get_rank()
        mine = expected[rank * rows : (rank + 1) * rows]
        assert torch.equal(parameter.grad.to_local().double(), mine)
        parameter.grad = None


def random_backwards(transport, count):
    """Returns the number of backwards that raised."""
    drawn = random.Random(transport)
    raised = 0
    for number in range(count):
        if number % PER_MODEL == 0:
            model = sharded(drawn, transport=transport)
        raises = drawn.random() < 0.05
        terms = draw(drawn, model, raises)
        mine = terms[dist.get_rank()]
        raised += raises
        if raises:
            with pytest.raises(ZeroDivisionError):
                model(mine).backward()
            assert all(parameter.grad is None for parameter in model.parameters_)
        else:
            model(mine).backward()
            check(model, terms)
    return raised
