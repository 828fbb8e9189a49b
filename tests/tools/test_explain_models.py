"""What ``explain`` tells of architectures of transformers."""

import re
import textwrap

import expecttest
import pytest
import torch
from support import transformer_models
from support.job import needs_a_job

from deepcompile_zero3 import explain, fully_shard

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


@pytest.mark.more
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


@pytest.mark.more
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
