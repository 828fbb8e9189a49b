"""Models that transformers loads in shards: compiled, generating, saved, and in its Trainer."""

import math
import os
import pathlib
import runpy

import pytest
import torch
import torch.distributed as dist
from models import INDUCTOR_TOO, join_as_torchrun
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deepcompile_zero3 import Zero3Module, capture_graphs, shard_in_transformers

fsdp = pytest.importorskip("transformers.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this transformers does not shard models", allow_module_level=True)

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "trainer.py"


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def saved_model(request, tmp_path):
    return _save_model(tmp_path, request.param)


def _save_model(folder, tied):
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def _loaded(folder, **settings):
    from transformers.distributed import DistributedConfig

    with shard_in_transformers():
        return AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(fsdp_size=2, **settings)
        )


def _values(model):
    return {fqn: parameter.full_tensor() for fqn, parameter in model.named_parameters()}


def _load_use_and_save(folder):
    join_as_torchrun()
    model, whole = _loaded(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert fsdp.fully_shard is torch_fully_shard  # restored
    assert isinstance(model, Zero3Module)
    assert fsdp.is_fsdp_managed_module(model)
    tokens = torch.randint(256, (2, 16))

    step = torch.compile(model, backend="zero3", options={"inductor": False}, fullgraph=True)
    with capture_graphs() as graphs:
        step(input_ids=tokens, labels=tokens).loss.backward()
    assert len(graphs.forward) == len(graphs.backward) == 1
    whole(input_ids=tokens, labels=tokens).loss.backward()
    for (fqn, parameter), expected in zip(
        model.named_parameters(), whole.parameters(), strict=True
    ):
        assert_close(parameter.grad.full_tensor(), expected.grad, msg=fqn)

    rank = dist.get_rank()
    prompt = {"input_ids": tokens[:1, : 4 + rank], "max_new_tokens": 2 + 3 * rank}
    generated = model.generate(**prompt, do_sample=False)  # of another length on each rank
    assert torch.equal(generated, whole.generate(**prompt, do_sample=False))

    for kind in ({}, {"distributed_checkpoint": True}):
        saved = os.path.join(folder, "saved", *kind)
        model.save_pretrained(saved, **kind)
        dist.barrier()
        again = _loaded(saved)
        assert again.config.architectures == ["LlamaForCausalLM"]
        assert_close(_values(again), dict(whole.named_parameters()), rtol=0, atol=0)

    mixed = _loaded(folder, fsdp_mixed_precision=True)
    assert mixed(input_ids=tokens).logits.dtype == torch.bfloat16


def test_a_model_is_loaded_in_shards_used_and_saved(run_apart, saved_model):
    run_apart(_load_use_and_save, saved_model)


def _train_as_the_example(folder, inductor):
    join_as_torchrun()
    example = runpy.run_path(str(EXAMPLE))
    with capture_graphs() as graphs:
        trainer = example["train"](folder, steps=3, inductor=inductor)
    assert graphs.backward
    model = _values(trainer.model)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "trained"))
    assert_close(model, dict(again.named_parameters()), rtol=0, atol=0)
    return losses, trainer.evaluate(trainer.train_dataset[:4])["eval_loss"]


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=INDUCTOR_TOO)])
def test_the_example_trains_with_the_trainer(run_apart, tmp_path, inductor):
    pytest.importorskip("accelerate")
    folder = _save_model(tmp_path, tied=False)
    (losses, evaluated), (_, others) = run_apart(_train_as_the_example, folder, inductor)
    assert losses[0] == pytest.approx(math.log(256), rel=0.1)
    assert evaluated < losses[0]
    assert evaluated == others
