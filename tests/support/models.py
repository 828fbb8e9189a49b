"""Small models, and the reference that sharded models are compared with.

The reference is one process of plain PyTorch on the whole batch. Losses are means over the batch,
and every rank takes an equal part of the batch. The mean of the ranks' gradients is therefore the
gradient of the whole batch.
"""

import contextlib
import copy
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.sharding.module_parameters import registered_in
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
    """Blocks and a head: [batch, width] -> [batch, width]."""

    def __init__(self, width=8, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model, blocks=(), **kwargs):
    """Returns ``model``, sharded with ``kwargs`` of ``fully_shard``, and an unsharded copy."""
    reference = copy.deepcopy(model)
    for block in blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs), reference


def shard_stack(depth=2, **kwargs):
    """Returns a ``Stack``, sharded block by block, and an unsharded copy."""
    model = Stack(depth=depth)
    return shard(model, model.blocks, **kwargs)


def stack_and_state(seed):
    """Returns a sharded ``Stack`` with random weights, and its state for a checkpoint."""
    torch.manual_seed(seed)
    model, _ = shard_stack()
    return model, {"model": get_model_state_dict(model)}


# Inductor takes ten times as long as running rewritten graphs op by op. Tests that are not about
# Inductor go through it in `make test-all` only.
INDUCTOR_TOO = (pytest.mark.inductor, pytest.mark.long)
through_inductor_too = pytest.param("zero3", marks=INDUCTOR_TOO)

either_transport = pytest.mark.parametrize("transport", ["shared_memory", "c10d"])

# Ways to run a model: see `compiled`.
each_way = pytest.mark.parametrize("how", ["eager", "interpreted", through_inductor_too])
compiled_each_way = pytest.mark.parametrize("how", ["interpreted", through_inductor_too])


def compiled(model, how, fullgraph=False, **options):
    """Returns ``model`` to run with "zero3", "interpreted" (zero3 without Inductor), "eager" or
    "inductor". Backward gathers all parameters again, unless ``options`` say otherwise.
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


def join_as_torchrun():
    """Sets the environment variables that torchrun sets."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # the group is there already


def batch_of(*shape, seed=0):
    """Returns random numbers, the same on every rank and device."""
    batch = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return batch.to(torch.get_default_device())


def mine(batch, group=None):
    """Returns this rank's rows of a batch, whose number of rows is divisible by that of ranks."""
    rows = batch.shape[0] // dist.get_world_size(group)
    assert rows * dist.get_world_size(group) == batch.shape[0]
    return batch.narrow(0, dist.get_rank(group) * rows, rows)


def mean_square(model, x):
    """Returns a loss that is a mean over the batch."""
    return model(x).square().mean()


def assert_same_step(model, reference, batch, *, run=None, optimizers=(), loss=mean_square):
    """Takes a step with both models and compares gradients, then parameters.

    Args:
        batch: the whole batch, the same on every rank.
        run: called in place of ``model``, such as the compiled model.
        optimizers: optimizers of both models. Without them, only gradients are compared, and kept.
    """
    loss(model if run is None else run, mine(batch)).backward()
    loss(reference, batch).backward()
    assert_same_gradients(model, reference)
    step(optimizers)
    if optimizers:
        assert_same_parameters(model, reference)


def assert_same_steps(model, reference, how, *shape, steps=2):
    """Takes steps with both models, of which ``model`` runs ``how``, on batches of ``shape``."""
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(steps):
        batch = batch_of(*shape, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


def step(optimizers, set_to_none=True):
    """Steps with all optimizers, and drops or zeroes the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def optimizers_of(*models):
    """Returns an optimizer for each model: SGD with momentum does not amplify rounding errors."""
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def assert_same_gradients(model, reference, tolerance=1e-5):
    """Asserts that gradients equal the reference's, None included, with parameters' placements."""
    for (fqn, parameter), (_, whole) in _pairs(model, reference):
        if whole.grad is None:
            assert parameter.grad is None, f"{fqn}: .grad is not None"
            continue
        assert isinstance(parameter.grad, DTensor), f"{fqn}: .grad is {parameter.grad!r}"
        assert parameter.grad.placements == parameter.placements, (
            f"{fqn}: {parameter.grad.placements}"
        )
        assert parameter.grad.to_local().shape == parameter.to_local().shape, fqn
        difference = relative_difference(_full(parameter.grad), whole.grad)
        assert difference <= tolerance, f"{fqn}: gradients differ by {difference:.1e}"


def assert_same_parameters(model, reference, tolerance=1e-5):
    """Asserts that every parameter is a shard of the reference's."""
    for (fqn, parameter), (_, whole) in _pairs(model, reference):
        assert isinstance(parameter, DTensor), f"{fqn} is a {type(parameter).__name__}"
        shard, whole = parameter.detach().double(), whole.detach().double()
        error = (_full(shard) - whole).norm()
        # A parameter that began at zero and whose gradient is rounding noise has hardly moved.
        difference = (error / whole.norm().clamp_min(1e-3)).item()
        assert difference <= tolerance, f"{fqn}: parameters differ by {difference:.1e}"


def _full(tensor):
    """Returns ``full_tensor()``. Over gloo, c10d's functional all-gather would read the memory of a
    GPU as if it were the host's.
    """
    if type(tensor) is not DTensor or not tensor.is_cuda or dist.get_backend() != "gloo":
        return tensor.full_tensor()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.to_local().cpu())
    return torch.cat(parts).to(tensor.device)


def relative_difference(actual, expected):
    """Returns the norm of the difference over the norm of the expected tensor."""
    assert actual.shape == expected.shape, f"{actual.shape} where {expected.shape} is expected"
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = (actual - expected).norm()
    return (difference / expected.norm()).item() if difference else 0.0


def in_little_memory(function, *args):
    """Returns ``function(*args)``, run with copies that take turns in three times the largest."""
    before, one_host.RING_BYTES = one_host.RING_BYTES, 0
    try:
        return function(*args)
    finally:
        one_host.RING_BYTES = before


class _Calls(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


def call_in_backward(x, function):
    """Returns a copy of ``x``, whose backward calls ``function()``, which may raise."""
    return _Calls.apply(x, function)


def in_backward(function):
    """Returns the result of ``function()``, called by the autograd engine."""
    results = []
    on_cpu = torch.get_default_device().type == "cpu"
    # A default device holds for its thread, and backwards on GPUs have their own.
    default = contextlib.nullcontext() if on_cpu else torch.get_default_device()

    def call():
        with default:
            results.append(function())

    call_in_backward(torch.ones((), requires_grad=True), call).backward()
    return results[0]


def _pairs(model, reference):
    pairs = list(zip(model.named_parameters(), reference.named_parameters(), strict=True))
    assert all(ours[0] == theirs[0] for ours, theirs in pairs)
    return pairs


def for_all(cases, check, examples):
    """Runs ``check(case)`` on all ranks for ``examples`` cases of ``cases``, a hypothesis strategy.

    Drawn cases may depend on the modules of a process. Rank 0 therefore draws for all ranks.
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


def layers_of(*widths):
    """Returns bias-free linear layers, of which backward needs the weights only."""
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairs))


def gathered_fqns(model):
    """Returns the FQNs of the parameters that are gathered."""
    return [p.fqn for p in registered_in(model) if p.handle.gathered is not None]
