"""Adapters on a frozen model, with and without libraries: only their gradients are reduced."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Block,
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    each_way,
    join_as_torchrun,
    mean_square,
    mine,
    through_inductor_too,
)
from support.transformer_models import llama
from torch import nn
from torch.testing import assert_close

from deepcompile_zero3 import fully_shard, record_collectives


def _is_adapter(fqn):
    return "lora_" in fqn


def _train(model, blocks, how, batches, loss):
    """Compares three steps with one process; returns the FQNs of each step's collectives."""
    reference = copy.deepcopy(model)
    for module in (*blocks, model):
        fully_shard(module)
    run = compiled(model, how, fullgraph=True)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for m in (model, reference)
    ]
    frozen = {fqn: p.full_tensor() for fqn, p in model.named_parameters() if not p.requires_grad}
    for seed in range(3):
        batch = batches(seed)
        with record_collectives() as log:
            ours = loss(run, mine(batch))
            ours.backward()
        expected = loss(reference, batch)
        expected.backward()
        assert_close(ours, loss(reference, mine(batch)), rtol=1e-5, atol=0)
        assert_same_gradients(model, reference)
        for fqn, parameter in model.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad == _is_adapter(fqn)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)
    for fqn, parameter in model.named_parameters():
        assert fqn not in frozen or torch.equal(parameter.full_tensor(), frozen[fqn])
    names = {fqn for fqn, _ in model.named_parameters()}
    travels = {
        op: {fqn for c in log if c.op == op for fqn in c.params}
        for op in ("all_gather", "reduce_scatter")
    }
    assert travels == {
        "all_gather": names,
        "reduce_scatter": {fqn for fqn in names if _is_adapter(fqn)},
    }
    return model


# ---- by hand


class Adapted(nn.Module):
    """A frozen linear layer plus a product of two thin matrices."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.lora_b = nn.Parameter(torch.randn(linear.out_features, rank) / rank)

    def forward(self, x):
        return self.linear(x) + x @ self.lora_a.t() @ self.lora_b.t()


class AdaptedStack(nn.Module):
    """Adapted layers: [batch, 8] -> [batch, 8]."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(8).requires_grad_(False)])
        for block in self.blocks:
            block.up = Adapted(block.up)
            block.down = Adapted(block.down)
        self.head = Adapted(nn.Linear(8, 8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _by_hand(how):
    model = AdaptedStack()
    _train(model, model.blocks, how, lambda seed: batch_of(4, 8, seed=seed), mean_square)


@pytest.mark.first(how="eager")
@each_way
def test_adapters_by_hand_train_as_on_one_process(run_ranks, how):
    run_ranks(2, _by_hand, how)


# ---- peft


def _adapted_llama(four_bits):
    from peft import LoraConfig, get_peft_model

    task = llama()
    del task.model.model.layers[1:], task.blocks[1:]
    task.model.config.num_hidden_layers = 1
    if four_bits:
        _quantize_with_bitsandbytes(task.blocks[0])
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return get_peft_model(task.model, config), task


def _quantize_with_bitsandbytes(block):
    import bitsandbytes

    for module in list(block.modules()):
        for name, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear):
                sizes = linear.in_features, linear.out_features
                quantized = bitsandbytes.nn.LinearNF4(*sizes, bias=False)
                quantized.load_state_dict(linear.state_dict())
                setattr(module, name, quantized.to("cpu"))  # which quantizes
    assert {p.dtype for p in block.parameters() if p.dim() == 2} == {torch.uint8}


def _of_peft(how, four_bits):
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model, task = _adapted_llama(four_bits)
    base = copy.deepcopy(model)
    _train(
        model,
        task.blocks,
        how,
        lambda seed: task.batch(4, seed)["input_ids"],
        lambda run, tokens: run(input_ids=tokens, labels=tokens).loss,
    )
    saved = get_peft_model_state_dict(model)
    assert len(saved) == 3 * 2  # matrices of each adapted layer
    set_peft_model_state_dict(base, {fqn: shard.full_tensor() for fqn, shard in saved.items()})
    batch = task.batch(4, seed=9)
    with torch.no_grad():
        assert_close(model(**batch).logits, base(**batch).logits)


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("four_bits", [False, pytest.param(True, marks=pytest.mark.more)])
def test_adapters_of_peft_train_as_on_one_process(run_ranks, how, four_bits):
    pytest.importorskip("peft")
    if four_bits:
        pytest.importorskip("bitsandbytes")
    run_ranks(2, _of_peft, how, four_bits)


# ---- accelerate


def _prepared(how, batches):
    """Returns the accelerator, a sharded Llama, and what `prepare` makes of it and of others."""
    from accelerate import (
        Accelerator,
        DistributedType,
        FullyShardedDataParallelPlugin,
        PartialState,
    )
    from torch.utils.data import DataLoader

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    # On a GPU accelerate does this itself.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    task = llama()
    model, reference = task.model, copy.deepcopy(task.model)
    for module in (*task.blocks, model):
        fully_shard(module)
    run = compiled(model, how)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    tokens = torch.cat([task.batch(4, seed)["input_ids"] for seed in range(batches)])
    loader = DataLoader(tokens, batch_size=4 // dist.get_world_size())  # rows of a rank
    prepared = accelerator.prepare(run, optimizer, loader)
    assert prepared[0] is run
    return accelerator, model, reference, *prepared, tokens


def _whole(model, optimizer):
    return {
        fqn: [parameter.full_tensor().detach().clone()]
        + [optimizer.state[parameter][key].full_tensor() for key in ("exp_avg", "exp_avg_sq")]
        for fqn, parameter in model.named_parameters()
    }


def _accelerate(how, folder):
    join_as_torchrun()
    accelerator, model, reference, run, optimizer, loader, tokens = _prepared(how, batches=4)
    expected = torch.optim.Adam(reference.parameters(), lr=0.01, eps=1e-3)
    seen = []
    for step, part in enumerate(loader):
        with accelerator.accumulate(run), record_collectives() as log:
            accelerator.backward(run(input_ids=part, labels=part).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(run.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert any(c.op == "reduce_scatter" for c in log) == bool(step % 2)
        seen.append(accelerator.gather_for_metrics(part))
        whole = tokens[step * 4 : (step + 1) * 4]
        (reference(input_ids=whole, labels=whole).loss / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            expected.step()
            expected.zero_grad()
    assert torch.equal(torch.cat(seen), tokens)
    assert_same_parameters(model, reference)
    accelerator.save_state(folder)
    return _whole(model, optimizer)


def _accelerate_goes_on(folder):
    join_as_torchrun()
    torch.manual_seed(9)  # other values
    accelerator, model, _, _, optimizer, *_ = _prepared("eager", batches=1)
    accelerator.load_state(folder)
    return _whole(model, optimizer)


@pytest.mark.parametrize(
    "how", ["eager", pytest.param("interpreted", marks=pytest.mark.more), through_inductor_too]
)
def test_accelerate_prepares_and_saves_a_sharded_model(run_apart, tmp_path, how):
    pytest.importorskip("accelerate")
    world_size, others = (4, (4, 2)) if how == "interpreted" else (2, (2,))
    saved, *_ = run_apart(_accelerate, how, str(tmp_path), world_size=world_size)
    for ranks in others:
        for loaded in run_apart(_accelerate_goes_on, str(tmp_path), world_size=ranks):
            assert_close(loaded, saved, rtol=0, atol=0)
