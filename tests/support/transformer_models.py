"""Models of Hugging Face transformers, of a few thousand parameters each.

Dropout is off, since ranks would draw different masks from one process.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 64
TOKENS = 12  # in a sequence
CLASSES = 5


@dataclass(frozen=True)
class Task:
    """A model and a task to learn.

    Attributes:
        blocks: modules that are sharded before the root.
        batch: ``batch(size, seed)`` returns the model's keyword arguments, the same on every rank.
    """

    model: nn.Module
    blocks: list[nn.Module]
    batch: object


def text(size, seed):
    shape = size, TOKENS
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def _images(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(size, 3, 16, 16, generator=generator),
        "labels": torch.randint(CLASSES, (size,), generator=generator),
    }


def llama():
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    return Task(model, list(model.model.layers), text)


def qwen3_moe():
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=TOKENS,
            use_cache=False,
        )
    )
    return Task(model, list(model.model.layers), text)


def gpt2():
    """Returns GPT-2, whose forward logs, which breaks the graph."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
    return Task(model, list(model.transformer.h), text)


def t5():
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )
    return Task(model, [*model.encoder.block, *model.decoder.block], text)


def vit():
    model = ViTForImageClassification(
        ViTConfig(
            problem_type="single_label_classification",  # otherwise the first step sets it
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=CLASSES,
        )
    )
    return Task(model, list(model.vit.layers), _images)
