"""Small models, and the reference that a sharded one is compared with.

The reference is one process of plain PyTorch on the whole batch. Losses are means over the batch,
and every rank takes an equal part of it, so the mean of the ranks' gradients is the gradient of
the whole.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.transport import one_host


class Block(nn.Module):
    """A residual feedforward block."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, then a head: [batch, width] -> [batch, width]."""

    def __init__(self, width=8, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model, blocks=(), **kwargs):
    """``model``, sharded, and a whole copy; ``kwargs`` are those of ``fully_shard``."""
    reference = copy.deepcopy(model)
    for block in blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs), reference


# Inductor takes ten times as long as the rewritten graphs take op by op: where a test is not about
# Inductor, only `make test-all` goes through it.
INDUCTOR_TOO = (pytest.mark.inductor, pytest.mark.long)
through_inductor_too = pytest.param("zero3", marks=INDUCTOR_TOO)

# How a model may run, see `compiled`.
each_way = pytest.mark.parametrize("how", ["eager", "interpreted", through_inductor_too])
compiled_each_way = pytest.mark.parametrize("how", ["interpreted", through_inductor_too])


def compiled(model, how, fullgraph=False, **options):
    """``model`` as it runs under "zero3", "interpreted" (zero3 without Inductor), "eager" or
    "inductor". Backward gathers again what forward gathered, unless ``options`` say otherwise.
    """
    match how:
        case "zero3" | "interpreted":
            options = {"keep_mb": 0, "inductor": how == "zero3"} | options
            return torch.compile(model, backend="zero3", fullgraph=fullgraph, options=options)
        case "inductor":
            return torch.compile(model, backend="inductor")
        case "eager":
            return model
    raise ValueError(how)


def batch_of(*shape, seed=0):
    """Random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mine(batch, group=None):
    """This rank's rows of a batch whose rows divide by the ranks."""
    rows = batch.shape[0] // dist.get_world_size(group)
    assert rows * dist.get_world_size(group) == batch.shape[0]
    return batch.narrow(0, dist.get_rank(group) * rows, rows)


def mean_square(model, x):
    """A loss: the mean over the batch."""
    return model(x).square().mean()


def assert_same_step(model, reference, batch, *, run=None, optimizers=(), loss=mean_square):
    """Takes a step with both and compares gradients, then parameters.

    Args:
        batch: the whole, the same on every rank.
        run: what is called in place of ``model``: the compiled one.
        optimizers: of both; without, gradients are compared and kept.
    """
    loss(model if run is None else run, mine(batch)).backward()
    loss(reference, batch).backward()
    assert_same_gradients(model, reference)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if optimizers:
        assert_same_parameters(model, reference)


def optimizers_of(*models):
    """One for each: plain SGD with momentum, which does not blow rounding errors up."""
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def assert_same_gradients(model, reference, tolerance=1e-5):
    """Gradients are placed as their parameters are, and equal the reference's, None's included."""
    for (fqn, parameter), (_, whole) in _pairs(model, reference):
        if whole.grad is None:
            assert parameter.grad is None, f"{fqn}: .grad is not None"
            continue
        assert isinstance(parameter.grad, DTensor), f"{fqn}: .grad is {parameter.grad!r}"
        assert parameter.grad.placements == parameter.placements, (
            f"{fqn}: {parameter.grad.placements}"
        )
        assert parameter.grad.to_local().shape == parameter.to_local().shape, fqn
        difference = relative_difference(parameter.grad.full_tensor(), whole.grad)
        assert difference <= tolerance, f"{fqn}: gradients differ by {difference:.1e}"


def assert_same_parameters(model, reference, tolerance=1e-5):
    """Every parameter is a shard of the reference's."""
    for (fqn, parameter), (_, whole) in _pairs(model, reference):
        assert isinstance(parameter, DTensor), f"{fqn} is a {type(parameter).__name__}"
        shard, whole = parameter.detach().double(), whole.detach().double()
        error = (shard.full_tensor() - whole).norm()
        # One that began at zero and whose gradient is rounding noise has hardly moved from there.
        difference = (error / whole.norm().clamp_min(1e-3)).item()
        assert difference <= tolerance, f"{fqn}: parameters differ by {difference:.1e}"


def relative_difference(actual, expected):
    """The norm of the difference by the norm of what is expected."""
    assert actual.shape == expected.shape, f"{actual.shape} where {expected.shape} is expected"
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = (actual - expected).norm()
    return (difference / expected.norm()).item() if difference else 0.0


def in_little_memory(function, *args):
    """``function(*args)``, whose copies take turns in three times the largest."""
    before, one_host.RING_BYTES = one_host.RING_BYTES, 0
    try:
        return function(*args)
    finally:
        one_host.RING_BYTES = before


def in_backward(function):
    """The result of ``function()``, called by the autograd engine."""
    results = []

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            results.append(function())
            return grad

    Call.apply(torch.ones((), requires_grad=True)).backward()
    return results[0]


def _pairs(model, reference):
    pairs = list(zip(model.named_parameters(), reference.named_parameters(), strict=True))
    assert all(ours[0] == theirs[0] for ours, theirs in pairs)
    return pairs


def for_all(cases, check, examples):
    """``check(case)`` on all ranks, for so many of the ``cases``, a strategy of hypothesis.

    What is drawn may depend on the modules of a process: the first rank draws for all.
    """

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(cases)
    def draw(case):
        check(_of_first_rank(case))

    if dist.get_rank() == 0:
        draw()
        _of_first_rank(None)
    else:
        while (case := _of_first_rank(None)) is not None:
            check(case)


def _of_first_rank(value):
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]
