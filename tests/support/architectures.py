"""Architectures of transformers: small configs, batches and losses."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

VOCABULARY = 64
PLACE = 3  # the token that a part of an image takes the place of
TOKENS = 8
LABELS = 5

# ---- batches, the same on every rank


def _integers(size, seed, least=PLACE + 1, most=VOCABULARY, length=TOKENS):
    return torch.randint(least, most, (size, length), generator=_generator(seed))


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def _prompts(size, seed):
    return {"input_ids": _integers(size, seed)}


def _text(size, seed):
    return {"input_ids": _integers(size, seed), "labels": _integers(size, seed)}


def _images(size, seed):
    return {"pixel_values": torch.randn(size, 3, 32, 32, generator=_generator(seed))}


def _labeled_images(size, seed):
    labels = torch.randint(LABELS, (size,), generator=_generator(seed))
    return _images(size, seed) | {"labels": labels}


def _images_and_prompts(size, seed):
    return _images(size, seed) | _prompts(size, seed)


def _images_and_text(size, seed):
    return _images(size, seed) | _text(size, seed)


def _images_in_text(size, seed):
    places = torch.full((size, 16), PLACE)
    text = torch.cat([places, _integers(size, seed)], 1)
    types = torch.ones_like(text)
    return _images(size, seed) | {"input_ids": text, "labels": text, "token_type_ids": types}


def _waves(size, seed):
    return {"input_values": torch.randn(size, 1, 400, generator=_generator(seed))}


def _speech(size, seed):
    waves = _waves(size, seed)["input_values"][:, 0]
    return {"input_values": waves, "labels": _integers(size, seed, length=3)}


def _spectra(size, seed):
    spectra = torch.randn(size, 16, 16, generator=_generator(seed))
    return {"input_features": spectra, "labels": _integers(size, seed)}


# ---- losses, each a mean over the rows of a batch


def _loss(outputs):
    return outputs.loss


def _matches(outputs):
    """Returns how ill images and texts match. A contrastive loss would not be a mean over rows."""
    return -outputs.logits_per_image.diagonal().mean()


def _loudness(outputs):
    return outputs.audio_values.square().mean()


def _pooled(outputs):
    return outputs.pooler_output.square().mean()


# ---- architectures


@dataclass(frozen=True)
class Architecture:
    """How to build a model and what it learns.

    Attributes:
        config: arguments of the model's config.
        batch: ``batch(size, seed)`` returns the model's keyword arguments.
        blocks: names of the classes that are sharded before the root, by default what the model
            says must not be split.
        dtype: float64 where float32 rounds more than the tolerance.
        loss: a function of the model's outputs.
        uncompiled: name of the class that runs in eager code within a compiled model.
    """

    config: dict
    batch: Callable = _text
    blocks: str = ""
    dtype: torch.dtype = torch.float32
    loss: Callable = _loss
    uncompiled: str = ""


TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
DECODER = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 4}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
CLASSES = {
    "num_labels": LABELS,
    "problem_type": "single_label_classification",  # otherwise the first step sets it
}
SPEECH = TEXT | {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
}

# fmt: off
ARCHITECTURES = {
    # decoders
    "GPTNeoXForCausalLM": Architecture(TEXT),
    "GPTJForCausalLM": Architecture(TEXT | {"rotary_dim": 4}),
    "OPTForCausalLM": Architecture(TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 16}),
    "BloomForCausalLM": Architecture(TEXT),
    "MptForCausalLM": Architecture(TEXT | {"expansion_ratio": 2, "max_seq_len": 32}),
    "Gemma3ForCausalLM": Architecture(DECODER | ALTERNATING),
    "Phi3ForCausalLM": Architecture(DECODER),
    "CohereForCausalLM": Architecture(DECODER),
    # mixtures of experts
    "MixtralForCausalLM": Architecture(EXPERTS),
    "GptOssForCausalLM": Architecture(EXPERTS | ALTERNATING),
    "GraniteMoeForCausalLM": Architecture(EXPERTS),
    "DeepseekV3ForCausalLM": Architecture(EXPERTS | {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }),
    "SwitchTransformersForConditionalGeneration": Architecture({
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
        "num_decoder_layers": 2, "num_heads": 4, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "num_experts": 2, "expert_capacity": 64,
        "router_jitter_noise": 0.0, "decoder_start_token_id": 0, "use_cache": False,
    }, uncompiled="SwitchTransformersExperts"),  # which chooses experts by Python numbers
    # state spaces and other recurrences
    "MambaForCausalLM": Architecture(TEXT | {"state_size": 4}),
    "Mamba2ForCausalLM": Architecture(TEXT | {
        "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4,
    }),
    "FalconMambaForCausalLM": Architecture(TEXT | {"state_size": 4}),
    "JambaForCausalLM": Architecture(DECODER | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    }),
    "FalconH1ForCausalLM": Architecture(DECODER | MAMBA | {"mamba_d_ssm": 32}),
    "Zamba2ForCausalLM": Architecture(TEXT | {
        "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1,
        "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 4, "mamba_ngroups": 1,
        "chunk_size": 4,
    }),
    "RecurrentGemmaForCausalLM": Architecture(DECODER | {
        "lru_width": 32, "attention_window_size": 4, "block_types": ["recurrent", "attention"],
    }),
    "RwkvForCausalLM": Architecture(TEXT | {"attention_hidden_size": 32, "context_length": 16}),
    "xLSTMForCausalLM": Architecture(TEXT | {
        "num_heads": 2, "chunkwise_kernel": "chunkwise--native_autograd",
        "sequence_kernel": "native_sequence__native", "step_kernel": "native",
    }),
    "Lfm2ForCausalLM": Architecture(DECODER | {"layer_types": ["conv", "full_attention"]}),
    "Qwen3NextForCausalLM": Architecture(EXPERTS | {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    }),
    # encoders
    "BertForMaskedLM": Architecture(TEXT),
    "AlbertForMaskedLM": Architecture(
        TEXT | {"embedding_size": 16}, blocks="AlbertEmbeddings AlbertLayer"),
    "DebertaV2ForMaskedLM": Architecture(TEXT | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    }, blocks="DebertaV2Layer"),
    "ModernBertForMaskedLM": Architecture(TEXT | {
        "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1,
        "sep_token_id": 2,
    }),
    "XLNetLMHeadModel": Architecture(
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
        blocks="XLNetLayer"),
    "LongformerForMaskedLM": Architecture(
        TEXT | {"attention_window": 4}, blocks="LongformerLayer"),
    # encoders with decoders
    "BartForConditionalGeneration": Architecture(SEQ2SEQ),
    "MarianMTModel": Architecture(SEQ2SEQ, blocks="MarianEncoderLayer MarianDecoderLayer"),
    "LEDForConditionalGeneration": Architecture(SEQ2SEQ | {
        "attention_window": 4, "max_encoder_position_embeddings": 32,
        "max_decoder_position_embeddings": 32,
    }, blocks="LEDEncoderLayer LEDDecoderLayer"),
    # images
    "Dinov2ForImageClassification": Architecture(CLASSES | IMAGE, _labeled_images),
    "SwinForImageClassification": Architecture(CLASSES | {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4,
    }, _labeled_images, "SwinLayer"),
    "ConvNextForImageClassification": Architecture(CLASSES | {
        "depths": [1, 2], "hidden_sizes": [16, 32], "num_stages": 2,
    }, _labeled_images, "ConvNextLayer"),
    "SegformerForImageClassification": Architecture(CLASSES | {
        "hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2,
        "num_attention_heads": [1, 2], "sr_ratios": [2, 1], "patch_sizes": [7, 3],
        "strides": [4, 2], "mlp_ratios": [2, 2],
    }, _labeled_images),
    "ResNetForImageClassification": Architecture(CLASSES | {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
    }, _labeled_images),
    # speech
    "Wav2Vec2ForCTC": Architecture(SPEECH, _speech, "Wav2Vec2EncoderLayer"),
    "HubertForCTC": Architecture(SPEECH, _speech, "HubertEncoderLayer", torch.float64),
    "WavLMForCTC": Architecture(SPEECH, _speech, "WavLMEncoderLayer", torch.float64),
    "WhisperForConditionalGeneration": Architecture(SEQ2SEQ | {
        "num_mel_bins": 16, "max_source_positions": 8, "max_target_positions": 32,
        "begin_suppress_tokens": None,
    }, _spectra),
    "Speech2TextForConditionalGeneration": Architecture(SEQ2SEQ | {
        "input_feat_per_channel": 16, "conv_channels": 16, "max_source_positions": 32,
        "max_target_positions": 32,
    }, _spectra, "Speech2TextEncoderLayer Speech2TextDecoderLayer"),
    "EncodecModel": Architecture({
        "num_filters": 4, "hidden_size": 16, "codebook_dim": 16, "codebook_size": 8,
        "upsampling_ratios": [4, 2], "num_lstm_layers": 1, "target_bandwidths": [24.0],
    }, _waves, "EncodecResnetBlock EncodecLSTM", torch.float64, loss=_loudness),
    # images and text
    "CLIPModel": Architecture(
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 32},
        _images_and_prompts, dtype=torch.float64, loss=_matches),
    "SiglipModel": Architecture(
        {"text_config": TEXT, "vision_config": IMAGE}, _images_and_prompts, loss=_matches),
    "LlavaForConditionalGeneration": Architecture({
        "text_config": DECODER | {"model_type": "llama"},
        "vision_config": IMAGE | {"model_type": "clip_vision_model"},
        "image_token_id": PLACE, "vision_feature_layer": -1,
    }, _images_in_text),
    "PaliGemmaForConditionalGeneration": Architecture({
        "text_config": DECODER | {"model_type": "gemma"},
        "vision_config": IMAGE | {"model_type": "siglip_vision_model"},
        "image_token_id": PLACE, "projection_dim": 32,
    }, _images_in_text),
    "BlipForConditionalGeneration": Architecture({
        "text_config": TEXT | {"encoder_hidden_size": 32, "sep_token_id": 2},
        "vision_config": IMAGE, "projection_dim": 32, "image_text_hidden_size": 32,
    }, _images_and_text),
    "GitForCausalLM": Architecture(
        TEXT | {"vision_config": IMAGE}, _images_and_text, "GitLayer GitVisionEncoderLayer"),
    "ViltModel": Architecture(TEXT | IMAGE, _images_and_prompts, "ViltLayer", loss=_pooled),
}
# fmt: on
