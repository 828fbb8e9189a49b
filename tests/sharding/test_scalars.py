"""Parameters without rows are replicated: scalars, and those without elements."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.mesh_models import replicas
from support.models import (
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
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import (
    defer_reduction,
    deposit_grad,
    explain,
    fully_shard,
    gradient_norms,
)


class _Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        gate = self.gate
        return x + gate * torch.tanh(self.up(x)) + gate


class _Scaled(nn.Module):
    """Blocks with a gate each, a scale, and a temperature that some ranks use."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Gated() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.6))
        self.temperature = nn.Parameter(torch.tensor(1.7))

    def forward(self, x, hot=True):
        for block in self.blocks:
            x = block(x)
        x = x * self.scale.exp()
        return x / self.temperature if hot else x


def _values(parameter):
    """Returns the value on each rank."""
    value = parameter.to_local()
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return torch.stack(values).tolist()


def _trains(how, transport):
    model = _Scaled()
    model, reference = shard(model, model.blocks, transport=transport)
    assert (model.scale.placements, model.scale.shape) == ((Replicate(),), ())
    options = {} if how == "eager" else {"fullgraph": True, "regions": True}
    run = compiled(model, how, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for seed in range(3):
        batch = batch_of(6, 6, seed=seed)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        assert_same_gradients(model, reference)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
        assert norms[0].full_tensor().item() == pytest.approx(norms[1].item(), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
    assert len(set(_values(model.scale))) == 1


@each_way
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_scalars_train_as_in_one_process(run_ranks, how, transport):
    run_ranks(3, _trains, how, transport)


def _missing(how):
    """Ranks and micro-batches differ in what they use."""
    model, reference = shard(_Scaled(), mesh=replicas())
    model.set_reduce_scatter_unused_params(True)
    run = compiled(model, how)
    rank = dist.get_rank()
    optimizers = optimizers_of(model, reference)
    for _ in range(2):
        for micro in range(3):
            model.set_requires_gradient_sync(micro > 0)
            model.set_requires_all_reduce(micro > 1)
            batch = batch_of(8, 6, seed=micro)
            hot = [micro == 0 and each == 2 for each in range(4)]
            run(mine(batch), hot[rank]).square().mean().backward()
            for each, rows in zip(hot, batch.chunk(4), strict=True):
                (reference(rows, each).square().mean() / 4).backward()
            assert micro == 2 or model.scale.grad is None
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)


def test_a_scalar_that_few_ranks_use_is_reduced_over_all_replicas(run_ranks):
    run_ranks(4, _missing, "eager")


def _late(how):
    """Gradients that are deposited."""
    model, reference = shard(_Scaled(), reshard_after_forward=True)
    run = compiled(model, how)
    batch = batch_of(4, 6)
    with defer_reduction(model):
        mean_square(run, mine(batch)).backward()
        deposit_grad(model.scale, torch.tensor(1.0 + dist.get_rank()))
    mean_square(reference, batch).backward()
    reference.scale.grad += 1.5
    assert_same_gradients(model, reference)
    assert gradient_norms(model)["scale"] == pytest.approx(reference.scale.grad.abs().item())


def test_a_gradient_of_a_scalar_may_come_late(run_ranks):
    run_ranks(2, _late, "interpreted")


@pytest.mark.more
def test_scalars_are_explained_before_the_first_step(one_rank):
    model, _ = shard(_Scaled(), reshard_after_forward=True)
    assert "gate" in str(explain(model, batch_of(4, 6)))


FULL = StateDictOptions(full_state_dict=True)


def _built(value):
    torch.manual_seed(0)
    model = _Scaled()
    nn.init.constant_(model.scale, value)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model), torch.optim.AdamW(model.parameters())


def _save(folder):
    model, optimizer = _built(0.5)
    mean_square(model, mine(batch_of(6, 6))).backward()
    optimizer.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    return _whole(model, optimizer)


def _load(folder):
    model, optimizer = _built(0.25)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return _whole(model, optimizer)


def _whole(model, optimizer):
    values, moments = get_state_dict(model, optimizer, options=FULL)
    return values, {name: moments["state"][name]["exp_avg"] for name in values}


def test_a_checkpoint_with_scalars_is_loaded_by_another_number_of_ranks(run_ranks, tmp_path):
    saved, _ = run_ranks(2, _save, tmp_path)
    for loaded in run_ranks(3, _load, tmp_path):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    assert saved[0]["scale"].item() != 0.5


def _goes_on_from_a_full_state():
    both = [_built(0.5) for _ in range(2)]
    for seed in range(2):
        for model, optimizer in both:
            mean_square(model, mine(batch_of(6, 6, seed=seed))).backward()
            optimizer.step()
            optimizer.zero_grad()
        if seed == 0:
            state = copy.deepcopy(get_optimizer_state_dict(*both[0], options=FULL))
            set_optimizer_state_dict(*both[1], state, options=FULL)
            model, optimizer = both[1]
            assert not isinstance(optimizer.state[model.scale]["exp_avg"], DTensor)
    for ours, theirs in zip(*(model.parameters() for model, _ in both), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())


def test_a_full_optimizer_state_with_scalars_goes_on(run_ranks):
    run_ranks(2, _goes_on_from_a_full_state)


class _Uses(nn.Module):
    """Reads parameters once and uses them several times."""

    def __init__(self, dtype, grad_dtype, is_checkpointed=False):
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=dtype))
        self.weight = nn.Parameter(batch_of(5, 5, seed=1).to(dtype))
        for parameter in self.parameters():
            parameter.grad_dtype = grad_dtype

    def forward(self, x):
        if self.is_checkpointed:
            return checkpoint(self.use, x, use_reentrant=False)
        return self.use(x)

    def use(self, x):
        x, scale, weight = x.to(self.scale.dtype), self.scale, self.weight
        scaled = torch.cat([x * scale, (x * 3.3) * scale, (x * 2.7) * scale])
        return scaled, torch.cat([x @ weight, (x * 3.3) @ weight, (x * 2.7) @ weight])


def _contract(how, is_checkpointed):
    for dtype in (torch.bfloat16, torch.float32):
        for grad_dtype in (torch.bfloat16, torch.float32, None):
            model = _Uses(dtype, grad_dtype, is_checkpointed)
            reference = _Uses(dtype, grad_dtype)
            fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() else None)
            run = compiled(model, how)
            for each in (run, reference):  # all ranks have the same batch
                sum(out.float().square().mean() for out in each(batch_of(32, 5))).backward()
            for name, whole in reference.named_parameters():
                grad = getattr(model, name).grad.full_tensor()
                assert grad.dtype == whole.grad.dtype, (name, dtype, grad_dtype)
                assert torch.equal(grad, whole.grad), (name, dtype, grad_dtype)
            torch._dynamo.reset()


@pytest.mark.thin
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("how", ["eager", "interpreted"])  # Inductor sums in another order
def test_parameters_that_are_not_read_as_gathered_keep_their_contract(
    run_ranks, how, is_checkpointed
):
    run_ranks(2, _contract, how, is_checkpointed)


# ---- parameters without elements


class _Empty(nn.Module):
    """A prompt and an adapter of rank 0."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.prompt = nn.Parameter(torch.empty(0, 6))
        self.a = nn.Parameter(torch.empty(0, 6))
        self.b = nn.Parameter(torch.empty(6, 0))
        self.bias = nn.Parameter(torch.empty(0))

    def forward(self, x):
        hidden = torch.cat([self.prompt, self.up(x)])
        return hidden + (hidden @ self.a.t() + self.bias) @ self.b.t()


def _trains_empty(how, transport):
    model, reference = shard(_Empty(), transport=transport)
    empty = [p for p in model.parameters() if p.numel() == 0]
    assert [p.placements for p in empty] == 4 * [(Replicate(),)]
    run = compiled(model, how)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for seed in range(2):
        batch = batch_of(4, 6, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    state = get_model_state_dict(model, options=FULL)
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in reference.state_dict().items()
    }
    model.load_state_dict(model.state_dict())


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_parameters_without_elements_are_trained(run_ranks, how, transport):
    run_ranks(2, _trains_empty, how, transport)


def test_a_compiled_step_of_an_optimizer_may_step_scalars(one_rank):
    model, reference = shard(_Gated())
    compiled_optimizer, optimizer = optimizers_of(model, reference)
    compiled_step = torch.compile(compiled_optimizer.step, backend="aot_eager")
    for seed in range(2):
        for run, step in ((model, compiled_step), (reference, optimizer.step)):
            mean_square(run, batch_of(4, 6, seed=seed)).backward()
            step()
        assert_same_parameters(model, reference)
