"""``step_in_backward``: parameters are stepped while the backward computes, with the same bits."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.mesh_models import replicas
from support.models import Stack, batch_of, compiled, each_way, either_transport, mean_square, mine
from support.owned_models import in_blocks
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import (
    MatrixOwners,
    Muon,
    Zero3Error,
    clip_grad_norm_,
    detect_nonfinite,
    fully_shard,
    gradient_norms,
    step_in_backward,
    step_locally,
)

ONE_KIB = 1 / 1024  # each parameter has a bucket of its own

OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "muon": lambda m: Muon([p for p in m.parameters() if hasattr(p.device_mesh, "owner")]),
}


def _models(optimizer, mesh=None, depth=2, **settings):
    """Returns two equal sharded models and their optimizers, of which the second steps early."""
    torch.manual_seed(0)
    whole = Stack(width=16, depth=depth)
    models, optimizers = [], []
    for _ in range(2):
        model = copy.deepcopy(whole)
        owners = MatrixOwners(model, mesh, is_matrix=in_blocks) if optimizer == "muon" else None
        for block in model.blocks:
            fully_shard(block, mesh=mesh, shard_placement_fn=owners, **settings)
        models.append(fully_shard(model, mesh=mesh, shard_placement_fn=owners, **settings))
        optimizers.append(OPTIMIZERS[optimizer](model))
    step_in_backward(models[1], optimizers[1], bucket_mb=ONE_KIB)
    return models, optimizers


def _watch(model):
    """Returns a list that gets the numbers of parameters with a gradient, as gradients come."""
    alive = []
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    return alive


def _assert_same(models):
    for (name, ours), theirs in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor()), name


def _same_bits(how, transport, optimizer):
    models, optimizers = _models(optimizer, transport=transport)
    runs = [compiled(model, how) for model in models]
    alive = _watch(models[1])
    for seed in range(3):
        for run in runs:
            mean_square(run, mine(batch_of(8, 16, seed=seed))).backward()
        if optimizer != "muon":
            assert all(p.grad is None for p in models[1].parameters())
        for each in optimizers:
            each.step()
            each.zero_grad()
        for model in models:
            model.zero_grad()
        _assert_same(models)
    assert optimizers[0].state_dict()["state"].keys() == optimizers[1].state_dict()["state"].keys()
    return max(alive)


@each_way
@either_transport
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_early_steps_change_the_same_bits(run_ranks, how, transport, optimizer):
    most = run_ranks(2, _same_bits, how, transport, optimizer)
    assert optimizer == "muon" or max(most) <= 6  # of 14: those of two buckets


def _hooks_see(how, transport):
    """Returns what hooks of early and of late parameters see, which are in ``late``."""
    torch.manual_seed(0)
    model = Stack(width=16)
    for block in model.blocks:
        fully_shard(block, transport=transport)
    fully_shard(model, transport=transport)
    early = [p for name, p in model.named_parameters() if "head" not in name]
    optimizer = torch.optim.SGD(early, 0.1)
    step_in_backward(model, optimizer, bucket_mb=ONE_KIB)
    seen = {True: set(), False: set()}

    def look(parameter):
        before = parameter._version
        with torch.no_grad():
            parameter.mul_(1.5)
        x = torch.ones(3, requires_grad=True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad((x * x).sum(), x)
        is_early = any(parameter is each for each in early)
        seen[is_early].add(
            (
                parameter._version - before,
                torch.is_grad_enabled(),
                (parameter.detach() * 2).to_local().is_leaf,
                gradient.sum().item(),
            )
        )

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    run = compiled(model, how)
    for seed in range(2):
        mean_square(run, mine(batch_of(8, 16, seed=seed))).backward()
    assert len(seen[True]) == 1
    assert seen[True] == seen[False]


@each_way
@either_transport
def test_hooks_of_early_gradients_see_the_state_of_others(run_ranks, how, transport):
    run_ranks(2, _hooks_see, how, transport)


def _step_early_while_held(how, transport):
    model = fully_shard(Stack(width=16), transport=transport)
    step_in_backward(model, torch.optim.AdamW(model.parameters(), fused=True), bucket_mb=ONE_KIB)
    model.set_reshard_after_backward(False)
    run = compiled(model, how)
    mean_square(run, mine(batch_of(8, 16))).backward()
    with pytest.raises(Zero3Error, match="has changed since it was gathered"):
        run(mine(batch_of(8, 16)))


@each_way
@either_transport
def test_an_early_step_of_weights_that_are_held_is_noticed(run_ranks, how, transport):
    run_ranks(2, _step_early_while_held, how, transport)


def _two_forwards(how, settings):
    models, optimizers = _models("adamw", **settings)
    seen: list[int] = []
    for module in (models[0], *models[0].blocks):
        module.set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
    for model in models:
        run = compiled(model, how)
        losses = [mean_square(run, mine(batch_of(8, 16, seed=seed))) for seed in range(2)]
        sum(losses).backward()
    for each in optimizers:
        each.step()
    assert sum(seen) == sum(p.to_local().numel() for p in models[0].parameters())
    _assert_same(models)


@each_way
@either_transport
def test_a_backward_of_two_forwards_steps_once(run_ranks, how, transport):
    run_ranks(2, _two_forwards, how, {"transport": transport})
    run_ranks(2, _two_forwards, how, {"transport": transport, "reshard_after_forward": False})


def _a_backward_in_between(settings):
    models, optimizers = _models("sgd", **settings)
    for model, optimizer in zip(models, optimizers, strict=True):
        losses = [mean_square(model, mine(batch_of(8, 16, seed=seed))) for seed in range(2)]
        model.set_is_last_backward(False)
        losses[0].backward()
        model.set_is_last_backward(True)
        (losses[1] + mean_square(model, mine(batch_of(8, 16, seed=2)))).backward()
        optimizer.step()
    _assert_same(models)


def test_a_forward_may_wait_for_the_next_backward(run_ranks):
    for reshards in (True, False):
        run_ranks(2, _a_backward_in_between, {"reshard_after_forward": reshards})


def _most_alive(depth):
    models, _ = _models("adamw", depth=depth)
    alive = _watch(models[1])
    mean_square(models[1], mine(batch_of(8, 16))).backward()
    return max(alive)


def test_live_gradients_do_not_grow_with_depth(run_ranks):
    shallow, deep = (max(run_ranks(2, _most_alive, depth)) for depth in (2, 8))
    assert deep <= shallow


def _micro_batches(way, mesh_of):
    models, optimizers = _models("adamw", mesh_of() if mesh_of else None)
    for _ in range(2):
        for model in models:
            for micro in range(3):
                if way == "no sync":
                    model.set_requires_gradient_sync(micro == 2)
                else:
                    model.set_is_last_backward(micro == 2)
                batch = mine(batch_of(8, 16, seed=micro))
                if micro == 2:  # some parameters have gradients of earlier micro-batches only
                    model.blocks[1](batch).square().mean().backward()
                else:
                    mean_square(model, batch).backward()
                    assert way == "no sync" or model.head.weight.grad is not None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _assert_same(models)


@pytest.mark.parametrize("way", ["no sync", "is last"])
@pytest.mark.parametrize("mesh_of", [None, replicas])
def test_only_the_last_micro_batch_steps(run_ranks, way, mesh_of):
    run_ranks(4, _micro_batches, way, mesh_of)


@needs_a_job
def test_a_backward_without_sync_steps_no_earlier_gradient():
    model = fully_shard(Stack(width=16))
    step_in_backward(model, OPTIMIZERS["sgd"](model), bucket_mb=ONE_KIB)
    for is_last in (False, True):
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(not is_last)
        mean_square(model, batch_of(4, 16)).backward()
        assert all(p.grad is not None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    mean_square(model, batch_of(4, 16)).backward()
    assert all(p.grad is None for p in model.parameters())


def _beside_others():
    """A part of the parameters is stepped, by an optimizer that steps locally and a scheduler."""
    torch.manual_seed(0)
    whole = Stack(width=16)
    models, optimizers, schedulers = [], [], []
    for early in (False, True):
        model = copy.deepcopy(whole)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.blocks.parameters(), lr=1.0)
        if early:
            step_locally(optimizer)
            step_in_backward(model, optimizer, bucket_mb=ONE_KIB)
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        models.append(model)
        optimizers.append(optimizer)
    for seed in range(3):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            model.zero_grad()
            mean_square(model, mine(batch_of(8, 16, seed=seed))).backward()
            assert model.head.weight.grad is not None
            optimizer.step()
            scheduler.step()
        _assert_same(models)
    with detect_nonfinite(models[1]):
        mean_square(models[1], mine(batch_of(8, 16))).backward()
        assert models[1].blocks[0].up.weight.grad is None
        bad = torch.full((4, 16), float("nan"))
        before = [p.full_tensor() for p in models[1].parameters()]
        with pytest.raises(Zero3Error, match="not finite"):
            mean_square(models[1], bad).backward()
    for parameter, value in zip(models[1].parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), value)


def test_other_parameters_schedulers_and_checks_work_as_before(run_ranks):
    run_ranks(2, _beside_others)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("a layer")


def _interrupted():
    models, optimizers = _models("sgd", depth=4)
    model = models[1]
    before = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    x = mine(batch_of(8, 16))
    for block in model.blocks[:2]:
        x = block(x)
    x = _Raises.apply(x)
    for block in model.blocks[2:]:
        x = block(x)
    with (
        pytest.warns(
            UserWarning,
            match=r"had begun to step '.*blocks.[23].*' and \d+ others .* and not the rest",
        ),
        pytest.raises(RuntimeError, match="a layer"),
    ):
        x.square().mean().backward()
    after = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert all(name.startswith(("blocks.2", "blocks.3")) for name in changed)
    optimizers[1].zero_grad()
    mean_square(model, mine(batch_of(8, 16))).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_backward_that_raises_says_what_was_stepped(run_ranks):
    run_ranks(2, _interrupted)


def _two_models_in_one_backward():
    """All gradients of the first model, and its steps, come before those of the second."""
    (first, optimizers), (second, _) = _models("sgd"), _models("sgd", depth=4)
    x = mine(batch_of(8, 16))
    for model in first:
        model.set_is_last_backward(False)
        mean_square(model, x).backward()
        model.set_is_last_backward(True)
    for after, before in zip(first, second, strict=True):
        after.blocks[1](before(x)).square().mean().backward()
    assert all(p.grad is None for p in first[1].parameters())
    optimizers[0].step()
    _assert_same(first)

    block = second[1].blocks[3]
    with (
        pytest.warns(UserWarning, match=r"had begun to step '.*blocks.3[^']*' and [1-5] others"),
        pytest.raises(RuntimeError, match="a layer"),
    ):
        block(_Raises.apply(x.clone().requires_grad_())).square().mean().backward()


def test_a_backward_of_two_models_steps_both_and_forgets_them(run_ranks):
    run_ranks(2, _two_models_in_one_backward)


class _Calls(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


def _raise():
    raise RuntimeError("a layer")


@needs_a_job
def test_backwards_that_raise_on_two_threads_name_what_each_has_stepped():
    models = [fully_shard(Stack(width=16)) for _ in range(2)]
    for model in models:
        step_in_backward(model, OPTIMIZERS["sgd"](model), bucket_mb=ONE_KIB)

    def backward(model, in_its_middle):
        x = _Calls.apply(batch_of(4, 16).requires_grad_(), in_its_middle)
        mean_square(model, x).backward()

    def raise_on_another_thread():
        with pytest.raises(RuntimeError, match="a layer"):
            backward(models[1], _raise)

    def run_the_other():
        thread = threading.Thread(target=raise_on_another_thread)
        thread.start()
        thread.join()
        _raise()

    with pytest.warns(UserWarning, match="to step") as warned, pytest.raises(RuntimeError):
        backward(models[0], run_the_other)
    told = [str(each.message) for each in warned]
    assert ["to step 'Stack:2." in each for each in told] == [True, False], told
    assert "to step 'blocks.0." in told[1]


class _Shared(nn.Module):
    """Blocks in checkpoints, one of them twice, and a weight that two layers share."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.use_reentrant))
        return self.last(x)


def _shared(use_reentrant, transport):
    torch.manual_seed(0)
    whole = _Shared(use_reentrant)
    models = [copy.deepcopy(whole) for _ in range(2)]
    for model in models:
        for block in model.blocks:
            fully_shard(block, transport=transport)
        fully_shard(model, transport=transport)
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1) for model in models]
    step_in_backward(models[1], optimizers[1], bucket_mb=ONE_KIB)
    for seed in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            mean_square(model, mine(batch_of(8, 16, seed=seed))).backward()
            optimizer.step()
            optimizer.zero_grad()
        _assert_same(models)


@pytest.mark.parametrize("use_reentrant", [False, True])
@either_transport
def test_checkpoints_and_shared_weights_are_stepped_once(run_ranks, use_reentrant, transport):
    run_ranks(2, _shared, use_reentrant, transport)


class _Early(nn.Module):
    """A weight whose last use comes first in backward, and is in a checkpoint with its first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        x = checkpoint(self.layers[0], x, use_reentrant=True)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x


def _recomputed_after_its_step():
    model = fully_shard(_Early())
    step_in_backward(model, torch.optim.SGD(model.parameters(), 0.1), bucket_mb=ONE_KIB / 4)
    with pytest.raises(Zero3Error, match="stepped in this backward, which needs it again"):
        mean_square(model, mine(batch_of(4, 16)).requires_grad_()).backward()


def test_a_backward_does_not_recompute_with_what_it_has_stepped(run_ranks):
    run_ranks(2, _recomputed_after_its_step)


def _removed():
    models, optimizers = _models("sgd")
    with pytest.raises(Zero3Error, match="stepped in backward already: call remove"):
        step_in_backward(models[1], optimizers[1])
    again = torch.optim.SGD(models[0].parameters(), 0.1)
    early = step_in_backward(models[0], again)
    mean_square(models[0], mine(batch_of(4, 16))).backward()
    assert models[0].head.weight.grad is None
    early.remove()
    mean_square(models[0], mine(batch_of(4, 16))).backward()
    assert models[0].head.weight.grad is not None
    clip_grad_norm_(models[0].parameters(), 1.0)
    models[1].head.weight = nn.Parameter(models[1].head.weight.detach().clone())
    with pytest.raises(Zero3Error, match=r"does not have '.*head.weight' as it is registered now"):
        mean_square(models[1], mine(batch_of(4, 16))).backward()


def test_early_steps_end_when_they_are_removed(run_ranks):
    run_ranks(2, _removed)


class _Lars(torch.optim.SGD):
    pass


def _refusals():
    model = Stack()
    fully_shard(model.blocks[0])
    fully_shard(model)
    other = nn.Linear(2, 2)
    with pytest.raises(Zero3Error, match="no sharded parameter of the model"):
        step_in_backward(model, torch.optim.SGD(other.parameters()))
    with pytest.raises(TypeError, match="takes an optimizer, got list"):
        step_in_backward(model, [])
    with pytest.raises(ValueError, match=r"LBFGS may need several .* pass is_separate=True"):
        step_in_backward(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="_Lars may need several"):
        step_in_backward(model, _Lars(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters())
    for bucket_mb in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"positive number of MiB .* got {bucket_mb}"):
            step_in_backward(model, optimizer, bucket_mb=bucket_mb)
    early = step_in_backward(model, optimizer)
    mean_square(model, mine(batch_of(4, 8))).backward()
    with pytest.raises(Zero3Error, match=r"clip_grad_norm_: backwards step 'blocks\.0\.norm"):
        clip_grad_norm_(model.parameters(), 1.0)
    assert gradient_norms(model) == {}
    with pytest.raises(Zero3Error, match=r"set_all_reduce_hook: backwards step 'blocks\.0\.norm"):
        model.blocks[0].set_all_reduce_hook(lambda gradient: None)
    mean_square(model, mine(batch_of(4, 8))).backward()
    early.remove()
    model.blocks[0].set_all_reduce_hook(lambda gradient: None)
    with pytest.raises(Zero3Error, match=r"set_all_reduce_hook on the group of 'blocks.0"):
        step_in_backward(model, optimizer)
    return dist.get_rank()


def test_what_needs_all_gradients_is_refused(run_ranks):
    assert run_ranks(2, _refusals) == [0, 1]
