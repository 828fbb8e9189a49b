"""Models that transformers loads in shards: compiled, generating, saved, and in its Trainer."""

import functools
import math
import os
import runpy
import threading
import types

import pytest
import torch
import torch.distributed as dist
import transformers.distributed.fsdp
from support.documents import blocks_of
from support.models import (
    INDUCTOR_TOO,
    assert_same_gradients,
    assert_same_parameters,
    compiled,
    join_as_torchrun,
    mine,
    optimizers_of,
)
from support.paths import EXAMPLES
from support.transformer_models import text
from support.transformer_plans import class_of, load_in_shards, small_model
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deepcompile_zero3 import (
    Zero3Error,
    Zero3Module,
    capture_graphs,
    fully_shard,
    shard_in_transformers,
)

fsdp = pytest.importorskip("transformers.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this transformers does not shard models", allow_module_level=True)

checkpoint = pytest.importorskip("transformers.distributed.checkpoint")

MOE = "MixtralForCausalLM"
EXAMPLE = EXAMPLES / "trainer.py"


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.long), True], ids=["untied", "tied"])
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
    return load_in_shards(AutoModelForCausalLM, folder, fsdp_size=2, **settings)


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
    expected = whole.generate(**prompt, do_sample=False)  # of another length on each rank
    for settings in ({}, {"synced_gpus": True}):
        assert torch.equal(model.generate(**prompt, do_sample=False, **settings), expected)

    for kind in ({}, {"distributed_checkpoint": True}):
        saved = os.path.join(folder, "saved", *kind)
        model.save_pretrained(saved, **kind)
        dist.barrier()
        again = _loaded(saved)
        assert again.config.architectures == ["LlamaForCausalLM"]
        assert_close(_values(again), dict(whole.named_parameters()), rtol=0, atol=0)

    mixed, theirs = (_loaded(folder, fsdp_mixed_precision=True, fsdp2=f) for f in (False, True))
    assert mixed(input_ids=tokens).logits.dtype == torch.bfloat16
    for each in (mixed, theirs):
        each(input_ids=tokens, labels=tokens).loss.backward()
    for ours, expected in zip(mixed.parameters(), theirs.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), expected.grad.full_tensor())


def test_a_model_is_loaded_in_shards_used_and_saved(run_apart, saved_model):
    run_apart(_load_use_and_save, saved_model)


@pytest.mark.usefixtures("one_rank")
def test_a_loader_may_give_a_part_of_the_model_another_dtype():
    with shard_in_transformers():
        model = transformers.distributed.fsdp.fully_shard(torch.nn.Linear(4, 4))
        shard = model.weight.detach().bfloat16()
        model._parameters["weight"] = torch.nn.Parameter(shard)
    with pytest.raises(Zero3Error, match=r"'weight' was torch.float32 .* is torch.bfloat16 now"):
        model(torch.ones(1, 4))
    model.to(torch.bfloat16)(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16


@pytest.mark.usefixtures("one_rank")
def test_a_loader_may_shard_several_modules_in_one_call():
    layers = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with shard_in_transformers():
        transformers.distributed.fsdp.fully_shard(layers)
    assert all(isinstance(layer, Zero3Module) for layer in layers)


class _ReadAtOnce(types.ModuleType):
    """A module whose ``fully_shard`` two threads first read at the same time."""

    def __init__(self):
        super().__init__("fsdp")
        self.value = torch_fully_shard
        self.barrier, self.readers = threading.Barrier(2), set()

    @property
    def fully_shard(self):
        value = self.value
        if threading.get_ident() not in self.readers:
            self.readers.add(threading.get_ident())
            self.barrier.wait(10)
        return value

    @fully_shard.setter
    def fully_shard(self, value):
        self.value = value


def test_of_two_threads_only_one_shards_in_transformers(monkeypatch):
    module, refused, outcomes = _ReadAtOnce(), threading.Event(), []
    monkeypatch.setattr(transformers.distributed, "fsdp", module)

    def load():
        try:
            with shard_in_transformers():
                outcomes.append("loaded")
                refused.wait(5)
        except Zero3Error as error:
            outcomes.append(str(error))
            refused.set()

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded, told = sorted(outcomes)
    assert loaded == "loaded"
    assert "runs already, here or in another thread" in told
    assert module.value is torch_fully_shard


def _train_on_a_mesh(folder, how, **settings):
    """Takes three steps, before the last of which the model and the optimizer are saved and loaded.

    Evaluates before each.
    """
    join_as_torchrun()
    cls, half, moments = (
        class_of(MOE),
        os.path.join(folder, "half"),
        os.path.join(folder, "moments"),
    )
    model, reference = load_in_shards(cls, folder, **settings), cls.from_pretrained(folder)
    optimizer, expected = optimizers_of(model, reference)
    run = compiled(model, how)
    for step in range(3):
        if step == 2:
            model.save_pretrained(half)
            checkpoint.save_optimizer_distributed(model, optimizer, moments)
            dist.barrier()
            model = load_in_shards(cls, half, **settings)
            (optimizer,) = optimizers_of(model)
            checkpoint.load_optimizer_distributed(model, optimizer, moments)
            run = compiled(model, how)
        whole = text(8, seed=step) | {"use_cache": False}
        batch = whole | {key: mine(whole[key]) for key in ("input_ids", "labels")}
        with torch.no_grad():
            assert_close(run(**batch).loss, reference(**batch).loss)
        run(**batch).loss.backward()
        reference(**whole).loss.backward()
        assert_same_gradients(model, reference)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert_same_parameters(model, reference)


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("eager", {"fsdp_size": 4, "ep_size": 2}),
        pytest.param("eager", {"fsdp_size": 2, "dp_replicate_size": 2}, marks=pytest.mark.more),
        pytest.param("interpreted", {"fsdp_size": 4, "ep_size": 2}, marks=pytest.mark.long),
        pytest.param(
            "interpreted", {"fsdp_size": 2, "dp_replicate_size": 2}, marks=pytest.mark.long
        ),
        pytest.param(
            "eager", {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}, marks=pytest.mark.long
        ),
    ],
    ids=["experts", "replicas", "experts-compiled", "replicas-compiled", "replicas-of-experts"],
)
def test_a_model_trains_on_a_mesh_of_transformers(run_ranks, tmp_path, how, settings):
    small_model(MOE, tied=False).save_pretrained(tmp_path)
    train = functools.partial(_train_on_a_mesh, str(tmp_path), how, **settings)
    run_ranks(4, train, timeout=300)


def _train_adapters(folder):
    from peft import LoraConfig, get_peft_model

    join_as_torchrun()
    tokens = torch.randint(256, (4, 16))
    models = _loaded(folder), AutoModelForCausalLM.from_pretrained(folder)
    adapted = []
    for model in models:
        torch.manual_seed(0)
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        adapted.append(get_peft_model(model, lora))
    model, reference = adapted
    for fqn, module in model.named_modules():
        if "lora_" in fqn and isinstance(module, torch.nn.Linear):
            fully_shard(module)
    fully_shard(model)
    run = compiled(model, "interpreted")
    run(input_ids=mine(tokens), labels=mine(tokens)).loss.backward()
    reference(input_ids=tokens, labels=tokens).loss.backward()
    assert_same_gradients(model, reference)


@pytest.mark.long
def test_adapters_on_a_model_that_was_loaded_in_shards_are_sharded_apart(run_apart, tmp_path):
    pytest.importorskip("peft")
    run_apart(_train_adapters, _save_model(tmp_path, tied=False))


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


@pytest.mark.more
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=INDUCTOR_TOO)])
def test_the_example_trains_with_the_trainer(run_apart, tmp_path, inductor):
    pytest.importorskip("accelerate")
    folder = _save_model(tmp_path, tied=False)
    (losses, evaluated), (_, others) = run_apart(_train_as_the_example, folder, inductor)
    assert losses[0] == pytest.approx(math.log(256), rel=0.1)
    assert evaluated < losses[0]
    assert evaluated == others


def _train_with_callback(folder, resume_from=None):
    """Trains on one text with the callback of docs/huggingface.md. Returns losses and weights."""
    from transformers import Trainer, TrainingArguments

    join_as_torchrun()
    [block] = [each for each in blocks_of("docs/huggingface.md") if "class Shards" in each.code]
    callback, trains = block.code.split("trainer = Trainer(...")
    assert "resume_from=" in trains
    page = {}
    exec(callback, page)
    model = _loaded(folder)
    model.compile(backend="zero3", options={"inductor": False})
    arguments = TrainingArguments(
        os.path.join(folder, "trained"),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_only_model=True,
        report_to=[],
        use_cpu=True,
    )
    data = [{name: tokens[0] for name, tokens in text(1, seed=1).items()}] * 64
    callbacks = [page["Shards"](resume_from=resume_from)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    return steps, {name: value.tolist() for name, value in _values(model).items()}


@pytest.mark.more
def test_a_training_with_the_trainer_goes_on_with_the_callback(run_apart, tmp_path):
    pytest.importorskip("accelerate")
    one, other = (_save_model(tmp_path / name, tied=False) for name in ("one", "other"))
    (steps, weights), _ = run_apart(_train_with_callback, one)
    assert steps == [1, 2, 3, 4]
    saved = os.path.join(one, "trained", "checkpoint-2")
    (steps, resumed), _ = run_apart(_train_with_callback, other, saved)  # from other weights
    assert steps == [3, 4]
    assert resumed == weights
