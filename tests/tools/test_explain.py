"""``explain`` reports what a step does, and leaves no trace."""

import inspect
import json
import re
import textwrap
from collections import Counter

import expecttest
import pytest
import torch
from support import transformer_models
from support.job import needs_a_job
from support.models import Stack, assert_same_step, batch_of, mean_square, mine, shard
from torch import nn

from deepcompile_zero3 import (
    Report,
    Zero3Error,
    capture_graphs,
    explain,
    fully_shard,
    record_collectives,
)

OPTIONS = {"inductor": False, "gather_bucket_mb": 0.02, "keep_mb": 0.02}


def _explained(name):
    torch.manual_seed(0)
    task = getattr(transformer_models, name)()
    for block in task.blocks:
        fully_shard(block)
    fully_shard(task.model)
    return str(explain(task.model, options=OPTIONS, **task.batch(2, seed=0)))


def _assert_explained(name, expected):
    text = re.sub(r"(\.py:)\d+", r"\1N", _explained(name))  # of a release of transformers
    text = textwrap.indent(text, 8 * " ")
    expecttest.assert_expected_inline(f"\n{text}\n        ", expected, skip=1)


class Tied(nn.Module):
    """A model that reads one parameter in two graphs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        torch._dynamo.graph_break()
        return self.head(x)


@needs_a_job
def test_llama_is_explained():
    _assert_explained(
        "llama",
        """
        LlamaForCausalLM: 20 parameters of 0.079 MiB over 1 rank, by messages
        at rest 0.079 MiB of shards; a step gathers 0.138 MiB and reduces 0.079 MiB
        predicted peak 8.402 MiB: shards 0.079, optimizer 0.157, gathered 0.004,
        activations 0.103, communication 8.059

        forward 0: at most 0.043 MiB gathered at once, 0.097 MiB of activations saved
        gathers                            dtype    MiB  starts before  needed by  ahead
        model.embed_tokens.weight and 6    f32    0.020  embedding      embedding      0
        more
        model.layers.0.mlp.gate_proj.weig  f32    0.016  embedding      t            103
        ht and 1 more
        model.layers.0.mlp.down_proj.weig  f32    0.020  t              t              9
        ht and 6 more
        model.layers.1.mlp.gate_proj.weig  f32    0.016  t              t             65
        ht and 1 more
        model.layers.1.mlp.down_proj.weig  f32    0.008  t              t              9
        ht and 1 more
        keeps 0.020 MiB that backward does not gather again: model.embed_tokens.weight
        and 5 more

        backward 0: at most 0.039 MiB gathered at once, beside what forward kept
        gathers                        dtype    MiB  starts before      needed by  ahead
        model.layers.1.mlp.up_proj.we  f32    0.020  nll_loss_backward  t             52
        ight and 3 more
        model.layers.1.self_attn.q_pr  f32    0.020  t                  t            111
        oj.weight and 2 more
        model.layers.0.mlp.gate_proj.  f32    0.020  t                  t             54
        weight and 6 more
        reduces                        raw, leaf, wire      MiB  copied
        model.norm.weight and 19 more  f32 -> f32 -> f32  0.079   0.079
        """,
    )


@needs_a_job
def test_qwen3_moe_is_explained():
    _assert_explained(
        "qwen3_moe",
        """
        Qwen3MoeForCausalLM: 25 parameters of 0.088 MiB over 1 rank, by messages
        at rest 0.088 MiB of shards; a step gathers 0.148 MiB and reduces 0.088 MiB
        predicted peak 8.422 MiB: shards 0.088, optimizer 0.175, gathered 0.011,
        activations 0.128, communication 8.020

        forward 0: at most 0.037 MiB gathered at once, 0.116 MiB of activations saved
        gathers                            dtype    MiB  starts before  needed by  ahead
        model.embed_tokens.weight and 8    f32    0.020  embedding      embedding      0
        more
        model.layers.0.mlp.gate.weight     f32    0.016  embedding      t            117
        and 1 more
        model.layers.0.mlp.experts.down_p  f32    0.020  t              transpose     19
        roj and 8 more
        model.layers.1.mlp.gate.weight     f32    0.016  transpose      t             86
        and 1 more
        model.layers.1.mlp.experts.down_p  f32    0.016  t              transpose     19
        roj and 2 more
        keeps 0.019 MiB that backward does not gather again:
        model.layers.0.input_layernorm.weight and 13 more

        backward 0: at most 0.033 MiB gathered at once, beside what forward kept
        gathers                        dtype    MiB  starts before      needed by  ahead
        model.layers.1.mlp.experts.ga  f32    0.020  nll_loss_backward  transpose     54
        te_up_proj and 1 more
        model.layers.1.self_attn.k_pr  f32    0.014  transpose          t            124
        oj.weight and 2 more
        model.layers.0.mlp.experts.ga  f32    0.020  t                  transpose     80
        te_up_proj and 1 more
        model.layers.0.self_attn.v_pr  f32    0.008  transpose          t             87
        oj.weight and 2 more
        reduces                     raw, leaf, wire      MiB  copied
        lm_head.weight and 24 more  f32 -> f32 -> f32  0.088   0.088
        """,
    )


@needs_a_job
def test_gpt2_is_explained():
    _assert_explained(
        "gpt2",
        """
        GPT2LMHeadModel: 28 parameters of 0.106 MiB over 1 rank, by messages
        at rest 0.106 MiB of shards; a step gathers 0.192 MiB and reduces 0.106 MiB
        predicted peak 8.518 MiB: shards 0.106, optimizer 0.213, gathered 0.011,
        activations 0.172, communication 8.016

        forward 0: at most 0.050 MiB gathered at once, 0.126 MiB of activations saved
        gathers                            dtype    MiB  starts before  needed by  ahead
        transformer.wte.weight and 4 more  f32    0.010  view           embedding      1
        transformer.h.0.attn.c_attn.weigh  f32    0.016  embedding      addmm         35
        t and 5 more
        transformer.h.0.mlp.c_fc.weight    f32    0.016  addmm          addmm         24
        and 1 more
        transformer.h.0.mlp.c_proj.weight  f32    0.016  addmm          addmm         11
        and 3 more
        transformer.h.1.attn.c_attn.weigh  f32    0.016  addmm          addmm          6
        t and 5 more
        transformer.h.1.mlp.c_fc.weight    f32    0.016  addmm          addmm         21
        and 1 more
        transformer.h.1.mlp.c_proj.weight  f32    0.016  addmm          addmm         11
        and 2 more
        keeps 0.019 MiB that backward does not gather again: transformer.wte.weight and
        20 more

        forward 1: at most 0.000 MiB gathered at once, 0.006 MiB of activations saved

        backward 0: at most 0.031 MiB gathered at once, beside what forward kept
        gathers                            dtype    MiB  starts before  needed by  ahead
        transformer.h.1.mlp.c_proj.weight  f32    0.016  view           t             13
        transformer.h.1.mlp.c_fc.weight    f32    0.016  t              t             23
        transformer.h.1.attn.c_attn.weigh  f32    0.012  t              t             27
        t
        transformer.h.0.mlp.c_proj.weight  f32    0.016  t              t              9
        transformer.h.0.mlp.c_fc.weight    f32    0.016  t              t             23
        transformer.h.0.attn.c_attn.weigh  f32    0.012  t              t             27
        t
        reduces                              raw, leaf, wire      MiB  copied
        transformer.ln_f.weight and 27 more  f32 -> f32 -> f32  0.106   0.106

        backward 1: at most 0.000 MiB gathered at once, beside what forward kept

        the graph breaks: transformers/modeling_utils.py:N: logging.Logger method not
        supported for non-export cases
        """,
    )


@needs_a_job
@pytest.mark.long
def test_t5_is_explained():
    _assert_explained(
        "t5",
        """
        T5ForConditionalGeneration: 47 parameters of 0.167 MiB over 1 rank, by messages
        at rest 0.167 MiB of shards; a step gathers 0.312 MiB and reduces 0.167 MiB
        predicted peak 8.774 MiB: shards 0.167, optimizer 0.333, gathered 0.004,
        activations 0.215, communication 8.055

        forward 0: at most 0.047 MiB gathered at once, 0.217 MiB of activations saved
        gathers                            dtype    MiB  starts before  needed by  ahead
        shared.weight and 4 more           f32    0.020  embedding      embedding      0
        encoder.block.0.layer.0.SelfAtten  f32    0.012  embedding      embedding     46
        tion.relative_attention_bias.weig
        ht and 3 more
        encoder.block.0.layer.1.DenseRelu  f32    0.020  embedding      t             47
        Dense.wo.weight and 4 more
        encoder.block.1.layer.0.SelfAtten  f32    0.020  t              t             52
        tion.o.weight and 5 more
        decoder.block.0.layer.0.SelfAtten  f32    0.016  t              t             52
        tion.q.weight and 5 more
        decoder.block.0.layer.1.EncDecAtt  f32    0.016  t              t             78
        ention.q.weight and 4 more
        decoder.block.0.layer.2.DenseRelu  f32    0.020  t              t             36
        Dense.wi.weight and 3 more
        decoder.block.1.layer.0.SelfAtten  f32    0.020  t              t             25
        tion.k.weight and 5 more
        decoder.block.1.layer.1.EncDecAtt  f32    0.016  t              t             58
        ention.v.weight and 3 more
        decoder.block.1.layer.2.DenseRelu  f32    0.008  t              t             30
        Dense.wo.weight and 1 more
        keeps 0.020 MiB that backward does not gather again: shared.weight and 5 more

        backward 0: at most 0.039 MiB gathered at once, beside what forward kept
        gathers                            dtype    MiB  starts before  needed by  ahead
        decoder.block.1.layer.2.DenseRelu  f32    0.020  view           t             50
        Dense.wi.weight and 3 more
        decoder.block.1.layer.0.SelfAtten  f32    0.016  t              t             99
        tion.o.weight and 4 more
        decoder.block.0.layer.2.DenseRelu  f32    0.020  t              t             98
        Dense.wo.weight and 3 more
        decoder.block.0.layer.1.EncDecAtt  f32    0.020  t              t             55
        ention.v.weight and 5 more
        decoder.block.0.layer.0.SelfAtten  f32    0.016  t              t            107
        tion.k.weight and 4 more
        encoder.block.1.layer.1.DenseRelu  f32    0.020  t              t             75
        Dense.wi.weight and 4 more
        encoder.block.1.layer.0.SelfAtten  f32    0.020  t              t             90
        tion.q.weight and 4 more
        encoder.block.0.layer.0.SelfAtten  f32    0.016  t              t             69
        tion.o.weight and 4 more
        reduces                                      raw, leaf, wire      MiB  copied
        decoder.final_layer_norm.weight and 46 more  f32 -> f32 -> f32  0.167   0.167
        """,
    )


@needs_a_job
def test_vit_is_explained():
    _assert_explained(
        "vit",
        """
        ViTForImageClassification: 40 parameters of 0.074 MiB over 1 rank, by messages
        at rest 0.074 MiB of shards; a step gathers 0.129 MiB and reduces 0.074 MiB
        predicted peak 8.372 MiB: shards 0.074, optimizer 0.148, gathered 0.019,
        activations 0.115, communication 8.016

        forward 0: at most 0.034 MiB gathered at once, 0.110 MiB of activations saved
        gathers                          dtype    MiB  starts before  needed by    ahead
        vit.embeddings.patch_embeddings  f32    0.016  convolution    convolution      0
        .projection.weight and 9 more
        vit.layers.0.attention.v_proj.w  f32    0.016  convolution    t               19
        eight and 7 more
        vit.layers.0.mlp.fc2.weight and  f32    0.016  t              t               23
        7 more
        vit.layers.1.attention.v_proj.w  f32    0.016  t              t               17
        eight and 7 more
        vit.layers.1.mlp.fc2.weight and  f32    0.009  t              t               23
        5 more
        keeps 0.019 MiB that backward does not gather again:
        vit.embeddings.patch_embeddings.projection.bias and 27 more

        backward 0: at most 0.039 MiB gathered at once, beside what forward kept
        gathers                        dtype    MiB  starts before      needed by  ahead
        vit.layers.1.attention.o_proj  f32    0.016  nll_loss_backward  t             44
        .weight and 3 more
        vit.layers.0.mlp.fc2.weight    f32    0.020  t                  t             58
        and 2 more
        vit.layers.0.attention.v_proj  f32    0.020  t                  t             43
        .weight and 4 more
        reduces                        raw, leaf, wire      MiB  copied
        classifier.weight and 39 more  f32 -> f32 -> f32  0.074   0.074
        """,
    )


def _prediction_and_step(make, options, settings):
    model = make()
    model, reference = shard(model, getattr(model, "blocks", ()), **settings)
    batch = torch.arange(8).remainder(16) if make is Tied else batch_of(8, 16)
    report = explain(model, mine(batch), options=options)
    run = torch.compile(model, backend="zero3", options=options)
    with record_collectives() as log:
        assert_same_step(model, reference, batch, run=run)
    gathered = Counter(name for c in log if c.op == "all_gather" for name in c.params)
    predicted = Counter(
        name for graph in report.graphs for bucket in graph.gathers for name in bucket.parameters
    )
    return report, gathered == predicted, _nbytes(log, "all_gather"), _nbytes(log, "reduce_scatter")


def _nbytes(log, op):
    return sum(c.nbytes for c in log if c.op == op)


def _stack():
    return Stack(width=16, depth=3)


@pytest.mark.thin
@pytest.mark.parametrize("make", [_stack, Tied])
@pytest.mark.parametrize(
    ("transport", "again", "keep_mb", "is_kept"),
    [
        ("shared_memory", None, 64, False),  # shared memory costs nothing to gather again
        ("shared_memory", False, 0, True),
        ("c10d", None, 0, False),
        ("c10d", None, 64, True),
        ("c10d", False, 0, True),
    ],
)
def test_a_step_then_moves_what_was_predicted(run_ranks, make, transport, again, keep_mb, is_kept):
    options = {"inductor": False, "keep_mb": keep_mb}
    settings = {"transport": transport, "reshard_after_forward": again}
    results = run_ranks(2, _prediction_and_step, make, options, settings)
    for report, is_alike, gathered, reduced in results:
        assert is_alike
        assert report.is_shared == (transport == "shared_memory")
        assert report.is_shared == ("are read in the memory that ranks share" in str(report))
        assert (report.gathered, report.reduced) == (gathered, reduced)
        assert report.shards == report.nbytes // report.world_size
        assert any(graph.kept for graph in report.graphs) == is_kept
    one, other = (report.peak for report, *_ in results)
    assert one == other


class Random(nn.Module):
    """A model whose forward writes to a buffer, replaces another and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1).expand(4))
        self.fails = False

    def forward(self, x):
        self.calls = self.calls + 1
        x = self.drop(self.norm(self.first(x) * self.mask))
        self._check()
        return x

    @torch.compiler.disable
    def _check(self):
        if self.fails:
            raise ValueError("as asked for")


@needs_a_job
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_changes(fails):
    model = fully_shard(Random())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    batch = batch_of(8, 4).requires_grad_()
    state = torch.get_rng_state()
    model.fails = fails
    if fails:
        with pytest.raises(ValueError, match="as asked for"):
            explain(model, batch, options=OPTIONS)
    else:
        assert isinstance(explain(model, batch, options=OPTIONS), Report)
    assert torch.equal(torch.get_rng_state(), state)
    assert batch.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0], name
    assert model.mask._version == buffers["mask"][1]  # nobody wrote to it


def _shard_stack(**settings):
    model = Stack()
    return shard(model, model.blocks, **settings)


@needs_a_job
@pytest.mark.parametrize(
    "again",
    [*(pytest.param(again, marks=pytest.mark.long) for again in (True, False)), None],
)
def test_later_compilations_are_as_without_explain(again):
    model, reference = _shard_stack(reshard_after_forward=again)
    for size in range(2, 12):  # more sizes than Dynamo's recompile limit
        report = explain(model, batch_of(size, 8), options=OPTIONS | {"keep_mb": size})
        assert len(report.graphs) == 2
    run = torch.compile(model, backend="zero3", options=OPTIONS)
    other, _ = _shard_stack(reshard_after_forward=again)
    with capture_graphs() as graphs:
        assert_same_step(model, reference, batch_of(5, 8), run=run)
    torch._dynamo.reset()  # else `other` runs what was compiled for `model`
    with capture_graphs() as others:
        torch.compile(other, backend="zero3", options=OPTIONS)(batch_of(5, 8)).sum()
    texts = [re.sub(r"Stack[:_]\d+[._]", "", one.forward[0].text) for one in (graphs, others)]
    assert texts[0] == texts[1]
    assert "f32[5, 8]" in texts[0]  # no symbolic size


@needs_a_job
def test_where_nothing_is_compiled_that_is_said():
    model = fully_shard(nn.Linear(2, 2))
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(Zero3Error, match="no graph was compiled"),
    ):
        explain(model, torch.ones(1, 2), options=OPTIONS)


@needs_a_job
def test_an_unknown_option_is_a_value_error():
    with pytest.raises(ValueError, match="unknown option 'nope'"):
        explain(fully_shard(nn.Linear(2, 2)), torch.ones(1, 2), options={"nope": 1})


@needs_a_job
def test_a_model_that_is_compiled_already_is_explained():
    model = fully_shard(Stack())
    run = torch.compile(model, backend="zero3", options=OPTIONS)
    batch = batch_of(4, 8)
    mean_square(run, batch).backward()
    assert explain(run, batch, options=OPTIONS).gathered > 0
    with torch.no_grad():
        assert explain(run, batch, options=OPTIONS).reduced > 0


class Broken(Stack):
    def forward(self, x):
        x = torch.compiler.disable(self.blocks[0])(x)
        if x.sum() > 0:
            x = x + 1
        return self.head(self.blocks[1](x))


@needs_a_job
def test_parameters_read_in_eager_code_are_named():
    report = explain(fully_shard(Broken()), batch_of(4, 8), options=OPTIONS)
    assert any(name.startswith("blocks.0.") for name in report.in_eager)
    assert not any(name.startswith("blocks.1.") for name in report.in_eager)
    line = inspect.getsourcelines(Broken.forward)[1] + 1
    place = f"tools/test_explain.py:{line}: "
    assert any(reason.startswith(place) and "disable" in reason for reason in report.breaks)
    assert sum("Data-dependent branching" in reason for reason in report.breaks) == 1
    assert any(f"test_explain.py:{line + 1}: Data" in reason for reason in report.breaks)
    text = str(report)
    assert "gathered by eager code" in text
    assert "the graph breaks" in text


@needs_a_job
def test_it_fits_80_columns_and_json():
    report = explain(fully_shard(Stack()), batch_of(4, 8), options=OPTIONS)
    assert max(map(len, str(report).splitlines())) <= 80
    told = json.loads(json.dumps(report.to_dict()))
    assert told["gathered"] == report.gathered
    assert set(told) == {
        "model",
        "world_size",
        "is_shared",
        "parameters",
        "nbytes",
        "shards",
        "graphs",
        "breaks",
        "in_eager",
        "quantized",
        "gathered",
        "reduced",
        "peak",
    }
    assert told["peak"]["shards"] == report.shards
    assert told["peak"]["optimizer"] == 2 * report.shards


@needs_a_job
def test_unsharded_models_are_refused():
    with pytest.raises(Zero3Error, match="explain"):
        explain(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(TypeError):
        explain(lambda x: x, torch.ones(1, 2))
