"""Architectures of transformers, sharded block by block, train like one process of plain PyTorch.

docs/models.md has a table of them. Models are built from configs, with two layers or so of a few
thousand parameters. Dropout is off, since ranks would draw different masks from one process.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from support import transformer_models
from support.architectures import ARCHITECTURES, Architecture
from support.models import assert_same_parameters, compiled, mine, optimizers_of
from support.transformer_models import Task
from torch import nn
from transformers import PretrainedConfig

from deepcompile_zero3 import capture_graphs, fully_shard
from deepcompile_zero3.graph.calls import calls_by_region

STEPS = 3


def _task_of(name):
    if name not in ARCHITECTURES:
        return getattr(transformer_models, name)()
    architecture, model_class = ARCHITECTURES[name], getattr(transformers, name)
    config = model_class.config_class(**copy.deepcopy(architecture.config))
    _disable_dropout(config)
    model = model_class(config).to(architecture.dtype).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # statistics of a batch are not a mean over its rows
    names = architecture.blocks.split() or model._no_split_modules
    blocks = [each for each in model.modules() if type(each).__name__ in names]
    return Task(model, blocks[::-1], architecture.batch)  # inner blocks first


def _disable_dropout(config):
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            _disable_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)


def _train(name, how, regions=None):
    """Returns the numbers of forward and backward graphs that each step compiles."""
    architecture = ARCHITECTURES.get(name, Architecture({}))
    task = _task_of(name)
    model = task.model
    reference = copy.deepcopy(model)
    for module in model.modules():
        if type(module).__name__ == architecture.uncompiled:
            module.forward = torch.compiler.disable(module.forward)
    assert len(task.blocks) > 1
    for block in task.blocks:
        fully_shard(block)
    fully_shard(model)
    run = compiled(model, how, regions=regions)
    optimizers = optimizers_of(model, reference)
    graphs = []
    for step in range(STEPS):
        batch = {
            key: value.to(model.dtype) if value.is_floating_point() else value
            for key, value in task.batch(4, seed=step).items()
        }
        with capture_graphs() as captured:
            loss = architecture.loss(run(**{key: mine(value) for key, value in batch.items()}))
            loss.backward()
        graphs.append((len(captured.forward), len(captured.backward)))
        if regions and step == 0:
            graphs_called = (calls_by_region(graph.graph_module) for graph in captured.forward)
            calls = [len(each) for regions in graphs_called for each in regions.values()]
            assert max(calls, default=0) > 1, "no two blocks are one region"
        expected = architecture.loss(reference(**batch))
        expected.backward()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        _assert_same_gradients(model, reference, none_is_zero=how != "eager")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)
    return graphs


def _assert_same_gradients(model, reference, none_is_zero, tolerance=1e-5):
    """Asserts that gradients are the reference's, but for those that are rounding errors alone.

    AOTAutograd may return zeros where eager code leaves None, without sharding too.
    """
    norms = [p.grad.norm() for p in reference.parameters() if p.grad is not None]
    least = 1e-3 * torch.stack(norms).norm().item()
    for (fqn, parameter), whole in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        if whole.grad is None:
            assert parameter.grad is None or none_is_zero, fqn
            assert parameter.grad is None or not parameter.grad.full_tensor().any(), fqn
            continue
        error = (parameter.grad.full_tensor() - whole.grad).norm().item()
        difference = error / max(whole.grad.norm().item(), least)
        assert difference <= tolerance, f"{fqn}: gradients differ by {difference:.1e}"


def _train_compiled(run_ranks, name, how, regions=None):
    first, *later = run_ranks(2, _train, name, how, regions, timeout=400)[0]
    assert min(first) > 0, "nothing was compiled"
    assert later == [(0, 0)] * (STEPS - 1), "a later step compiled again"


IN_TEST_MODELS = ["llama", "qwen3_moe", "gpt2", "t5", "vit"]  # trained compiled there
THROUGH_INDUCTOR = [
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "Mamba2ForCausalLM",
    "BertForMaskedLM",
    "BartForConditionalGeneration",
    "ConvNextForImageClassification",
    "WhisperForConditionalGeneration",
    "CLIPModel",
    "Qwen3NextForCausalLM",
]
IN_REGIONS = [  # equal blocks are compiled once
    "GPTNeoXForCausalLM",
    "CohereForCausalLM",
    "GPTJForCausalLM",
    "BertForMaskedLM",
    "BartForConditionalGeneration",
    "Dinov2ForImageClassification",
    "HubertForCTC",
    "WhisperForConditionalGeneration",
    "SiglipModel",
    "Phi3ForCausalLM",
]
# torch's own backend "aot_eager" fails without sharding, too: softplus_backward's strides are not
# those that its fake has.
NOT_OP_BY_OP = {"Qwen3NextForCausalLM"}


@pytest.mark.long
@pytest.mark.parametrize("name", [*ARCHITECTURES, *IN_TEST_MODELS])
def test_an_architecture_trains_in_eager_code(run_ranks, name):
    run_ranks(2, _train, name, "eager")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_OP_BY_OP])
def test_an_architecture_trains_through_rewritten_graphs(run_ranks, name):
    _train_compiled(run_ranks, name, "interpreted")


@pytest.mark.long
@pytest.mark.parametrize("name", IN_REGIONS)
def test_an_architecture_trains_in_regions(run_ranks, name):
    _train_compiled(run_ranks, name, "interpreted", regions=True)


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("name", THROUGH_INDUCTOR)
def test_an_architecture_trains_through_inductor(run_ranks, name):
    _train_compiled(run_ranks, name, "zero3")
