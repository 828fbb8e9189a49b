"""Small models of the architectures for which transformers has a plan for FSDP, and their loading.

All need the release of transformers that shards models, transformers 5.
"""

import contextlib
import functools
import importlib
import pathlib
import re

import torch
import transformers
from support.transformer_models import TOKENS, VOCABULARY
from transformers import PretrainedConfig, PreTrainedModel

from deepcompile_zero3 import shard_in_transformers

LARGEST = 1_500_000  # parameters of a small model

# Sizes of a small model. An architecture gets those that its config has.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4 * TOKENS,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 8,
    "rel_extent": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    # linear attention and Mamba
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
    # tokens
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

# What single architectures need beside SIZES, by the name of the folder.
_OWN = {
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": None,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

# Those that SIZES and _OWN do not make small, and why.
NOT_SMALL = {
    "CohereCompassForCausalLM": "its config has no rotary embedding for its own layers",
    "CsmDepthDecoderForCausalLM": "it takes the states of another model",
    "DbrxForCausalLM": "its default config cannot be built",
    "Dots3NoteForCausalLM": "the sizes of each layer differ",
    "Gemma4AssistantForCausalLM": "it takes the states of another model",
    "Inkling2ForCausalLM": "its number of residual blocks",
    "Inkling2LoopForCausalLM": "its number of residual blocks",
    "KyutaiSpeechToTextForConditionalGeneration": "it takes audio",
    "Mistral4ForCausalLM": "its rotary embedding depends on its default sizes",
    "Phi4MultimodalForCausalLM": "it has encoders of images and audio",
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": "it takes audio",
    "Qwen3OmniMoeTalkerForConditionalGeneration": "it takes audio",
    "Qwen3_5MoeForConditionalGeneration": "it has an encoder of images",
    "Qwen4ExpForCausalLM": "its default config cannot be built",
    "Qwen4ExpForConditionalGeneration": "it has an encoder of images",
}


@functools.cache
def architectures() -> dict[str, str]:
    """Returns the classes that have a plan of their own: the module of each, by name.

    No module is imported.
    """
    modules = {}
    root = pathlib.Path(transformers.__file__).parent
    for path in sorted(root.glob("models/*/modeling_*.py")):
        source = path.read_text()
        for plan in re.finditer(r"^    _fsdp_plan = ", source, re.MULTILINE):
            name = re.findall(r"^class (\w+)", source[: plan.start()], re.MULTILINE)[-1]
            modules[name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return modules


def class_of(name: str) -> type[PreTrainedModel]:
    return getattr(importlib.import_module(architectures()[name]), name)


def small_config(name: str, tied: bool) -> PretrainedConfig:
    """Returns the config of a small model, with one layer of each kind.

    Raises:
        ValueError: the model has more than ``LARGEST`` parameters.
    """
    cls = class_of(name)
    default = cls.config_class()
    known = vars(default).keys() | default.attribute_map.keys()
    settings = {setting: size for setting, size in SIZES.items() if setting in known}
    settings |= dict.fromkeys((s for s in known if "dropout" in s and s in vars(default)), 0.0)
    if {"kv_lora_rank", "num_key_value_heads"} <= known:
        settings["num_key_value_heads"] = SIZES["num_attention_heads"]
    if kinds := list(dict.fromkeys(vars(default).get("layer_types") or ())):
        settings["layer_types"] = kinds if len(kinds) > 1 else 2 * kinds
        settings["num_hidden_layers"] = len(settings["layer_types"])
    settings |= _OWN.get(cls.__module__.split(".")[-2], {})
    config = cls.config_class(**settings, tie_word_embeddings=tied)
    with torch.device("meta"):
        size = cls(config).num_parameters()
    if size > LARGEST:
        raise ValueError(f"{name}: {size} parameters")
    return config


def small_model(name: str, tied: bool) -> PreTrainedModel:
    """Returns a small model with random weights, the same on every call."""
    torch.manual_seed(0)
    return class_of(name)(small_config(name, tied))


def load_in_shards(cls, path, *, fsdp2=False, dtype=torch.float32, **settings):
    """Returns a model of ``cls``, loaded with a ``DistributedConfig`` of ``settings``.

    With ``fsdp2``, torch's own ``fully_shard`` shards it.
    """
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**settings)
    with contextlib.nullcontext() if fsdp2 else shard_in_transformers():
        return cls.from_pretrained(path, distributed_config=config, dtype=dtype)
