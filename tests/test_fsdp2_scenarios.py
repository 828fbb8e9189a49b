"""What FSDP2's own tests ask of it and no other test here does: forwards and backwards in unusual
numbers, orders and parts, in eager and compiled, beside one process of plain PyTorch.
"""

import copy
import gc
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import (
    Block,
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from one_rank import one_rank  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import (
    Zero3Error,
    Zero3Module,
    fully_shard,
    record_collectives,
    register_fsdp_forward_method,
)

either_way = pytest.mark.parametrize("how", ["interpreted", "eager"])
needs_a_job = pytest.mark.usefixtures("one_rank")


def fqns(log, op):
    return [fqn for c in log if c.op == op for fqn in c.params]


def step(optimizers, set_to_none=True):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


# ---- what goes from module to module


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class InContainers(nn.Module):
    """Takes and gives a dict of a list of a tuple and a named tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, tree):
        (x,), pair = tree["all"]
        x, y, z = (self.linear(each).tanh() for each in (x, *pair))
        return {"all": [(x,), Pair(y, z)]}


@dataclass
class Inner:
    x: torch.Tensor


@dataclass
class Outer:
    inner: Inner
    y: torch.Tensor
    name: str = ""


class InDataclasses(InContainers):
    """Takes and gives a dataclass in a dataclass."""

    def forward(self, outer):
        x, y = (self.linear(each).tanh() for each in (outer.inner.x, outer.y))
        return Outer(Inner(x), y, outer.name)


class Through(nn.Module):
    """Sends its input through two modules that take ``kind``."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x):
        if self.kind is InDataclasses:
            tree = Outer(Inner(x), 2 * x, "kept")
        else:
            tree = {"all": [(x,), Pair(2 * x, 3 * x)]}
        for layer in self.layers:
            tree = layer(tree)
        if self.kind is InDataclasses:
            assert tree.name == "kept"
            return tree.inner.x + tree.y
        (x,), (y, z) = tree["all"]
        return x + y + z


def _in_containers(how, kind):
    model = Through(kind)
    # Casts must reach what is inside: of inputs to float64, of outputs back.
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
    model, reference = shard(model, model.layers, mp_policy=policy)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@each_way
@pytest.mark.parametrize("kind", [InContainers, InDataclasses])
def test_activations_travel_in_containers(run_ranks, how, kind):
    run_ranks(2, _in_containers, how, kind)


# ---- which outputs, in which order, how often


class Branching(nn.Module):
    """A checkpointed trunk, two branches, and what never runs."""

    def __init__(self):
        super().__init__()
        self.trunk = Block(8)
        self.left, self.right, self.idle = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = checkpoint(self.trunk, x, use_reentrant=False)
        return self.left(x).tanh(), self.right(x).tanh()


def _branching(how):
    model = Branching()
    # Groups in groups in groups.
    blocks = [model.trunk.up, model.trunk, model.left, model.idle]
    model, reference = shard(model, blocks)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)

    def compare(backward):
        """``backward(forward, batch)``, where ``batch(seed)`` is the rows to take."""
        backward(run, lambda seed: mine(batch_of(4, 8, seed=seed)))
        backward(reference, lambda seed: batch_of(4, 8, seed=seed))
        if how != "eager":  # as with any compiler, what no gradient reaches gets zeros
            for branch in (reference.left, reference.right):
                for parameter in branch.parameters():
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
        assert_same_gradients(model, reference)
        assert model.idle.weight.grad is None
        step(optimizers)
        assert_same_parameters(model, reference)

    def of_both(forward, batch):
        left, right = forward(batch(0))
        (left * right + left * left).mean().backward()

    def of_one(forward, batch):
        forward(batch(1))[0].square().mean().backward()

    def of_one_after_the_other(forward, batch):
        left, right = forward(batch(2))
        right.square().mean().backward(retain_graph=True)
        left.square().mean().backward()

    def of_two_forwards(forward, batch):
        first, second = forward(batch(3)), forward(batch(4))
        with torch.no_grad():
            forward(batch(5))
        (first[0].square().mean() - second[1].mean() + second[0].mean()).backward()

    def of_two_forwards_in_turn(forward, batch):
        losses = [forward(batch(seed))[0].square().mean() for seed in (6, 7)]
        for loss in losses:  # not the last one first
            loss.backward()

    compare(of_both)
    compare(of_one)
    compare(of_one_after_the_other)
    compare(of_two_forwards)
    compare(of_two_forwards_in_turn)


@each_way
def test_backward_may_go_through_parts_of_forwards(run_ranks, how):
    run_ranks(2, _branching, how)


class Looping(nn.Module):
    """Runs its layers again and again, also without gradients, and one that is frozen; has a block
    in two places, and a weight in two groups.
    """

    def __init__(self):
        super().__init__()
        self.trained, self.frozen, self.tied = (nn.Linear(8, 8) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.tied.weight = self.trained.weight
        block = nn.Linear(8, 8)
        self.twice = nn.Sequential(block, nn.Tanh(), block)

    def forward(self, x):
        for _ in range(2):
            x = self.frozen(torch.relu(self.trained(x)))
            with torch.no_grad():
                x += torch.relu(self.trained(x))
        return self.tied(self.twice(x))


def _looping(how):
    model = Looping()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    blocks = [model.trained, model.frozen, model.tied, model.twice[0]]
    model, reference = shard(model, blocks)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert model.tied.weight is model.trained.weight
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        with record_collectives() as log:
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert sorted(fqns(log, "reduce_scatter")) == sorted(trained)


@each_way
def test_sharded_modules_may_run_several_times_in_a_forward(run_ranks, how):
    run_ranks(2, _looping, how)


# ---- which parameters train


class Tuned(Stack):
    def forward(self, x):
        return self.head(checkpoint(self.blocks[0], x, use_reentrant=False))


def _fine_tuned(how):
    model = Tuned(depth=1)
    model, reference = shard(model, model.blocks)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed, everything in enumerate((False, False, True)):
        for m in (model, reference):
            for name, parameter in m.named_parameters():
                parameter.requires_grad_(everything or "bias" in name)
        batch = batch_of(4, 8, seed=seed)
        with record_collectives() as log:
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert sorted(fqns(log, "reduce_scatter")) == sorted(trained)
        with torch.no_grad():
            assert_close(run(batch), reference(batch))


@each_way
def test_biases_alone_may_train_and_then_everything(run_ranks, how):
    run_ranks(2, _fine_tuned, how)


# ---- micro-batches


def _in_parts(model, reference, run, optimizers, unsynced, set_to_none):
    """A step of three micro-batches, where ``unsynced(flag)`` says which gradients wait for the
    last; how often each parameter was reduced.
    """
    with record_collectives() as log:
        for micro in range(3):
            unsynced(micro == 2)
            batch = batch_of(4, 8, seed=micro)
            mean_square(run, mine(batch)).backward()
            mean_square(reference, batch).backward()
            model.train(micro == 1).float().to("cpu")  # which changes nothing of what waits
    assert_same_gradients(model, reference)
    step(optimizers, set_to_none)
    assert_same_parameters(model, reference)
    reduced = fqns(log, "reduce_scatter")
    return {name: reduced.count(name) for name in reduced}


def _interleaved(model, reference, run, optimizers):
    """One backward behind the forwards, all parameters gathered before, reduced once."""
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    waiting = []
    with record_collectives() as log:
        for module in (*model.blocks, model):
            module.unshard(async_op=True)
        for micro in range(3):
            batch = batch_of(4, 8, seed=micro)
            waiting.append(mean_square(run, mine(batch)))
            mean_square(reference, batch).backward()
            if micro:
                waiting.pop(0).backward()
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        waiting.pop().backward()
    assert_same_gradients(model, reference)
    step(optimizers)
    assert_same_parameters(model, reference)
    every = sorted(name for name, _ in model.named_parameters())
    assert sorted(fqns(log, "all_gather")) == every
    assert sorted(fqns(log, "reduce_scatter")) == every


def _micro_batches(how):
    model = Stack()
    model, reference = shard(model, model.blocks, reshard_after_forward=False)
    both = model, reference
    run = compiled(model, how)
    optimizers = optimizers_of(*both)
    block = [name for name, _ in model.named_parameters() if "blocks.0" in name]
    head = [name for name, _ in model.named_parameters() if "head" in name]
    rest = [n for n, _ in model.named_parameters() if n not in block and n not in head]

    def times(block_s, rest_s, head_s):
        counts = dict.fromkeys(block, block_s) | dict.fromkeys(rest, rest_s)
        return counts | dict.fromkeys(head, head_s)

    first = model.blocks[0].set_requires_gradient_sync
    reduced = _in_parts(*both, run, optimizers, first, set_to_none=False)
    assert reduced == times(1, 3, 3)

    def outermost(sync):
        model.set_requires_gradient_sync(sync, recurse=False)

    reduced = _in_parts(*both, run, optimizers, outermost, set_to_none=False)
    assert reduced == times(3, 3, 1)
    every = model.set_requires_gradient_sync
    assert _in_parts(*both, run, optimizers, every, set_to_none=True) == times(1, 1, 1)
    _interleaved(*both, run, optimizers)


@each_way
def test_micro_batches_wait_block_by_block_and_interleave(run_ranks, how):
    run_ranks(2, _micro_batches, how)


class Chunked(nn.Module):
    """Its head, which is tied to its embedding, may be left for later."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.norm(self.body(self.embed(tokens)))


def _chunked(how):
    """The loss is computed a chunk of the hidden states at a time."""
    model = Chunked()
    reference = copy.deepcopy(model)
    fully_shard([model.embed, model.norm, model.head], reshard_after_forward=False)
    fully_shard(model)
    body, head = compiled(model, how), compiled(model.head, how)
    optimizers = optimizers_of(model, reference)

    def backward(body, head, tokens):
        hidden = body(tokens)
        gradients = []
        for chunk in hidden.detach().chunk(4, dim=1):
            chunk = chunk.contiguous().requires_grad_()
            (mean_square(head, chunk) / 4).backward()
            gradients.append(chunk.grad)
        return hidden, torch.cat(gradients, dim=1)

    for seed in range(4):
        tokens = torch.randint(17, (4, 8), generator=torch.Generator().manual_seed(seed))
        last = seed % 2 == 1
        model.set_requires_gradient_sync(last)
        model.head.set_reshard_after_backward(False)
        with record_collectives() as log:
            hidden, gradient = backward(body, head, mine(tokens))
        assert fqns(log, "all_gather").count("embed.weight") == 1
        model.head.set_reshard_after_backward(True)
        model.head.reshard()
        hidden.backward(gradient)
        hidden, gradient = backward(reference, reference.head, tokens)
        hidden.backward(gradient)
        if last:
            assert_same_gradients(model, reference)
            step(optimizers)
            assert_same_parameters(model, reference)


@each_way
def test_a_head_may_run_by_itself_in_chunks(run_ranks, how):
    run_ranks(2, _chunked, how)


# ---- where sharded modules are


class Encoder(nn.Module):
    """Is always called by another name."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)

    def forward(self, x):
        raise NotImplementedError

    def encode(self, x):
        return self.conv(x.unsqueeze(1)).sum(-1)


class Mostly(nn.Module):
    """Sharded modules in one that is not, which gathers one of them ahead."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.plain = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        if isinstance(self.blocks[0], Zero3Module):
            self.blocks[0].unshard(async_op=True)
        x = self.plain(self.encoder.encode(x)) * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def _partly_sharded(how):
    model = Mostly()
    reference = copy.deepcopy(model)
    for module in (model.encoder, *model.blocks):
        fully_shard(module)
        gc.collect()
    register_fsdp_forward_method(model.encoder, "encode")
    model.scale = nn.Parameter(torch.ones(8))  # late, and not sharded
    reference.scale = nn.Parameter(torch.ones(8))
    run = compiled(model, how)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, foreach=False) for m in (model, reference)]
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert isinstance(ours, DTensor) == ("encoder" in name or "blocks" in name), name
            if not isinstance(ours, DTensor):  # nobody has reduced it
                dist.all_reduce(ours.grad)
                ours.grad /= dist.get_world_size()
            grad = ours.grad.full_tensor() if isinstance(ours, DTensor) else ours.grad
            assert_close(grad, theirs.grad, msg=name)
        step(optimizers)
    assert_close(run(batch), reference(batch))


@each_way
def test_sharded_modules_may_be_in_one_that_is_not(run_ranks, how):
    run_ranks(2, _partly_sharded, how)


def _whole_then_block(how):
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks)
    run, block = compiled(model, how), compiled(model.blocks[0], how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        mean_square(block, mine(batch)).backward()
        mean_square(reference.blocks[0], batch).backward()
        assert_same_gradients(model, reference)
        step(optimizers)
    assert_close(run(batch), reference(batch))


@each_way
def test_the_whole_and_a_block_of_it_may_take_steps_in_turn(run_ranks, how):
    run_ranks(2, _whole_then_block, how)


@needs_a_job
def test_a_slice_of_a_sharded_sequential_is_a_plain_one():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    part = model[:2]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]
    part(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[2].weight.grad is None


@needs_a_job
def test_a_model_without_parameters_of_its_own_can_be_unsharded():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for module in (*model, model):
        fully_shard(module)
    model.unshard(async_op=True).wait()
    assert isinstance(model[0].weight, DTensor)
    model.reshard()
    model(torch.ones(2, 4)).sum().backward()


# ---- when things are gathered


def _kept_by_hand(how):
    """How often each weight is gathered in a step where the outermost module alone keeps what it
    has gathered; then a step whose weights are let go of between forward and backward.
    """
    layers = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    model, reference = shard(nn.Sequential(*layers), layers[:1], reshard_after_forward=True)
    model.set_reshard_after_forward(False, recurse=False)
    run = compiled(model, how)
    batch = batch_of(4, 8).requires_grad_()
    with record_collectives() as log:
        assert_same_step(model, reference, batch, run=run)
    model.set_reshard_after_forward(False)
    loss = mean_square(run, mine(batch))
    for module in (model, model[0]):
        module.reshard()
    assert isinstance(model[0].weight, DTensor)
    assert isinstance(model[1].weight, DTensor)
    loss.backward()
    mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    return [fqns(log, "all_gather").count(name) for name in ("0.weight", "1.weight")]


@either_way
def test_the_outermost_module_alone_may_keep_its_weights_and_all_may_let_go(run_ranks, how):
    assert run_ranks(2, _kept_by_hand, how) == 2 * [[2, 1]]


class Recomputing(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _misguided():
    model = Recomputing(depth=3)
    reference = copy.deepcopy(model)
    first, second, third = model.blocks
    for modules in (first.up, [first, second], third, model):
        fully_shard(modules)
    first.set_modules_to_backward_prefetch([third])  # which is over then
    third.set_modules_to_backward_prefetch([second, first.up])
    third.set_modules_to_forward_prefetch([first])
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, optimizers=optimizers)


def test_hints_that_mislead_change_no_gradient(run_ranks):
    run_ranks(2, _misguided)


def _checkpointed_alone():
    model = Stack()
    # Activations have the shape of weights: a checkpoint does not notice if they are confused.
    model.blocks[1] = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    model, reference = shard(model, model.blocks)
    for early_stop in (True, False):
        kwargs = {"use_reentrant": False, "early_stop": early_stop}
        for i in range(2):
            batch = batch_of(16, 8, seed=i).requires_grad_()
            checkpoint(model.blocks[i], mine(batch), **kwargs).square().mean().backward()
            mean_square(reference.blocks[i], batch).backward()
        assert_same_gradients(model, reference)


def test_a_block_that_runs_by_itself_may_be_checkpointed(run_ranks):
    run_ranks(2, _checkpointed_alone)


# ---- optimizers


def _stepped_in_hooks(how):
    model, reference = shard(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)))
    run = compiled(model, how)
    adams = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    assert_same_step(model, reference, batch_of(4, 8), run=run)
    step(adams)
    for m in (model, reference):
        for parameter in m.parameters():
            own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

            def hook(parameter, own=own):
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(hook)
    for seed in range(1, 4):
        mean_square(run, mine(batch_of(4, 8, seed=seed))).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_parameters(model, reference, tolerance=1e-3)  # Adam divides by little at first


@each_way
def test_optimizers_may_change_and_step_in_hooks(run_ranks, how):
    run_ranks(2, _stepped_in_hooks, how)


# ---- dtypes


def _normalised(how):
    """Layers of all kinds in bfloat16, and one that casts for itself, as FSDP2 runs them."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    own = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(output_dtype=torch.bfloat16)  # as its statistics are not low
    whole = Normalised()
    policies = {"last": own, "batch1d": mixed, "batch2d": mixed}
    results = []
    for sharding in (torch_fully_shard, fully_shard):
        model = copy.deepcopy(whole)
        for name, layer in model.named_children():
            sharding(layer, mp_policy=policies.get(name, low))
        sharding(model, mp_policy=low)
        run = compiled(model, how) if sharding is fully_shard else model
        output = run(mine(batch_of(4, 36)))
        output.square().mean().backward()
        grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
        results.append([output, *grads, *model.buffers()])
        assert model.last.seen == (torch.float32, torch.float32)
    for theirs, ours in zip(*results, strict=True):
        assert_close(ours, theirs, rtol=3e-2, atol=3e-3)  # and of the same dtype


class Casting(nn.Linear):
    """Is given more than its input, and casts that itself."""

    def forward(self, x, y):
        self.seen = x.dtype, y.dtype
        return super().forward((x + y).to(self.weight.dtype))


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.batch2d = nn.BatchNorm2d(4)
        self.up = nn.Linear(64, 16)
        self.batch1d = nn.BatchNorm1d(16)
        self.layer = nn.LayerNorm(16)
        self.last = Casting(16, 4)

    def forward(self, x):
        x = self.batch2d(self.conv(x.view(-1, 1, 6, 6))).flatten(1)
        x = self.layer(self.batch1d(self.up(x)))
        return self.last(x.float(), torch.ones(16))


@each_way
def test_normalisation_and_casts_of_ones_own_are_those_of_fsdp2(run_ranks, how):
    run_ranks(2, _normalised, how)


class Noting(nn.Linear):
    """Notes the dtypes of its inputs."""

    def forward(self, x):
        self.noted = [*getattr(self, "noted", ()), x.dtype]
        return super().forward(x)


class Rerun(nn.Module):
    """Runs all of a layer again in backward."""

    def __init__(self):
        super().__init__()
        self.layer = Noting(8, 8)
        self.given = []

    def through(self, x):
        x = self.layer(x)
        self.given.append(x.dtype)
        return x

    def forward(self, x):
        return checkpoint(self.through, x, use_reentrant=False, early_stop=False).float().sum()


@needs_a_job
@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_recomputation_casts_as_the_forward_did(output_dtype):
    model = Rerun()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output_dtype)
    fully_shard(model.layer, mp_policy=policy)
    fully_shard(model)(batch_of(2, 8)).backward()
    assert model.layer.noted == 2 * [torch.bfloat16]
    assert model.given == 2 * [output_dtype]
    assert model.layer.weight.grad.dtype == torch.float32


class WithCodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.ones(8, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return self.linear(x) * self.codes


@needs_a_job
@either_way
def test_what_is_frozen_at_first_is_reduced_in_its_dtype_later(how):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(WithCodes(), mp_policy=policy).requires_grad_(False)
    run = compiled(model, how)
    with torch.no_grad():
        run(batch_of(2, 8))
    model.linear.requires_grad_(True)
    with record_collectives() as log:
        run(batch_of(2, 8)).sum().backward()
    assert {c.dtype for c in log if c.op == "reduce_scatter"} == {torch.float32}
    assert model.linear.weight.grad.dtype == torch.float32
    assert model.codes.grad is None


# ---- states


def _state_dicts():
    model, reference = shard(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2)))
    state = model.state_dict()
    pointers = {name: tensor.to_local().data_ptr() for name, tensor in state.items()}
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        assert_same_step(model, reference, batch_of(4, 6, seed=seed), optimizers=optimizers)
    model.unshard()
    now = model.state_dict()
    assert list(now) == list(reference.state_dict())
    for name, tensor in now.items():
        assert isinstance(tensor, DTensor)
        assert tensor.to_local().data_ptr() == pointers[name]
        assert torch.equal(tensor, state[name])  # which was taken before
    model.reshard()
    model.load_state_dict({name: tensor.clone().fill_(3) for name, tensor in state.items()})
    for name, parameter in model.named_parameters():
        assert parameter.to_local().data_ptr() == pointers[name]
        assert (parameter.to_local() == 3).all()


def test_a_state_dict_shares_memory_with_the_model(run_ranks):
    run_ranks(2, _state_dicts)


def _piece_by_piece(how):
    reference = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    for module in (model[0], model):
        fully_shard(module)
    donor, _ = shard(reference, [reference[0]])
    for name, tensor in donor.state_dict().items():
        model.load_state_dict({name: tensor.clone()}, assign=True, strict=False)
    assert_close(compiled(model, how)(batch_of(4, 6)), donor(batch_of(4, 6)))


@either_way
def test_a_model_on_the_meta_device_is_loaded_piece_by_piece(run_ranks, how):
    run_ranks(2, _piece_by_piece, how)


class Scaled(nn.Module):
    """Has a parameter that is computed of others."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5, bias=False)
        self.scale = nn.Parameter(torch.empty(5))

    def compute(self):
        self.scale = nn.Parameter(torch.linalg.norm(self.linear.weight.detach(), dim=1))

    def forward(self, x):
        return self.linear(x) * self.scale


def _computed(how):
    with torch.device("meta"):
        model = Scaled()
    fully_shard(model.linear)
    fully_shard(model)
    model.linear.to_empty(device="cpu")
    reference = Scaled()
    with torch.no_grad():
        rows = model.linear.weight
        rows.copy_(distribute_tensor(reference.linear.weight, rows.device_mesh, [Shard(0)]))
    for m in (model, reference):
        m.compute()
    run = compiled(model, how)
    assert_same_step(model, reference, batch_of(4, 8), run=run)


@either_way
def test_a_parameter_may_be_computed_of_sharded_ones(run_ranks, how):
    run_ranks(2, _computed, how)


# ---- meshes


def _of_groups():
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    shards, replicas = pairs[rank // 2], pairs[2 + rank % 2]
    mesh = DeviceMesh.from_group(
        [replicas, shards],
        "cpu",
        mesh=torch.arange(4).view(2, 2),
        mesh_dim_names=("replicate", "shard"),
    )
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks, mesh=mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            if rank >= 2:
                parameter.fill_(7)
            dist.broadcast(parameter.to_local(), src=rank % 2, group=replicas)
    assert_same_parameters(model, reference)
    mean_square(model, mine(batch_of(4, 8))).backward()
    mean_square(reference, batch_of(4, 8)).backward()
    assert_same_gradients(model, reference)


def test_a_mesh_may_be_made_of_groups_and_replicas_of_the_first(run_ranks):
    run_ranks(4, _of_groups)


class Parallel(Block):
    """Is parallelized, and has a layer that is not."""

    def __init__(self, width):
        super().__init__(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(super().forward(x))


def _in_three_dimensions():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = Parallel(8)
    reference = copy.deepcopy(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["replicate", "shard"])
    data = mesh["replicate"].get_group()
    for seed in range(2):
        mean_square(model, mine(batch_of(4, 8, seed=seed), data)).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        assert_same_gradients(model, reference)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(ours.full_tensor(), theirs)
    assert model.up.weight.device_mesh.ndim == 3


def test_replicas_may_be_tensor_parallel(run_ranks):
    run_ranks(4, _in_three_dimensions)


def _by_columns():
    place = lambda p: Shard(1) if p.dim() > 1 else None  # noqa: E731
    model = fully_shard(Block(8), shard_placement_fn=place)

    def see(module, args):
        assert all(p.is_contiguous() for p in (module.weight, module.bias))

    for layer in (model.up, model.down):
        layer.register_forward_pre_hook(see)
    model(mine(batch_of(4, 8))).sum().backward()
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad):
            assert tensor.is_contiguous()
            assert tensor.to_local().is_contiguous()


def test_what_is_sharded_by_columns_is_contiguous(run_ranks):
    run_ranks(2, _by_columns)


# ---- one rank


@needs_a_job
@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_one_rank_divides_by_the_factor_too(factor):
    model = fully_shard(nn.Linear(8, 4, bias=False))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(torch.ones(3, 8)).sum().backward()
    assert torch.equal(model.weight.grad.to_local(), torch.full((4, 8), 3 / (factor or 1)))


# ---- transforms, subclasses


@needs_a_job
def test_a_forward_may_be_transformed_by_torch_func():
    model, reference = shard(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)))
    x, tangent = batch_of(2, 8), batch_of(2, 8, seed=1)
    ours = torch.func.jvp(model, (x,), (tangent,))
    assert_close(ours, torch.func.jvp(reference, (x,), (tangent,)))
    constant = torch.func.jvp(lambda unused: model(x), (tangent,), (tangent,))
    assert_close(constant, (reference(x), torch.zeros(2, 4)))


@needs_a_job
def test_a_parameter_of_a_tensor_subclass_is_refused():
    model = nn.Linear(4, 4, bias=False)
    weight = model.weight.detach()
    model.weight = nn.Parameter(TwoTensor(weight, 2 * weight))
    with pytest.raises((Zero3Error, NotImplementedError), match=r"'weight' is a.* TwoTensor"):
        fully_shard(model)
    assert type(model) is nn.Linear
