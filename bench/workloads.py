"""The models, and the work of each rank in a step."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Transformers makes an attention mask under tracing but not in eager code: a model that is compiled
# whole would run a slower kernel than compiled blocks. For a registered name it makes no mask.
AttentionInterface.register("causal", sdpa_attention_forward)


@dataclass(frozen=True)
class Workload:
    """A causal language model with random weights and untied embeddings.

    Attributes:
        batch, sequence: windows in a rank's step, and tokens in a window.
        param_dtype, reduce_dtype: dtypes of the mixed precision policy; None keeps fp32.
        attention: the name of the attention in Transformers; "causal" is "sdpa" without a mask.
        device: the device that the model is built and trained on.
    """

    about: str
    hidden: int
    layers: int
    intermediate: int
    batch: int
    sequence: int
    heads: int = 8
    vocabulary: int = 8192
    experts: int = 0
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    attention: str = "sdpa"
    device: str = "cpu"

    def build(self) -> nn.Module:
        """Builds the model, with the same weights in every process."""
        torch.manual_seed(0)
        shape = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.sequence,
            "tie_word_embeddings": False,
            "use_cache": False,
            "attn_implementation": self.attention,
        }
        with torch.device(self.device):
            if self.experts:
                return Qwen3MoeForCausalLM(
                    Qwen3MoeConfig(
                        **shape,
                        head_dim=self.hidden // self.heads,
                        num_experts=self.experts,
                        num_experts_per_tok=2,
                        moe_intermediate_size=self.intermediate,
                    )
                )
            return LlamaForCausalLM(LlamaConfig(**shape))

    def tokens(self, generator: torch.Generator) -> torch.Tensor:
        """Returns random tokens of a rank, ``[batch, sequence]``."""
        tokens = torch.randint(self.vocabulary, (self.batch, self.sequence), generator=generator)
        return tokens.to(self.device)


_A = {"hidden": 512, "layers": 8, "intermediate": 1376, "batch": 4, "sequence": 128}
_B = {"hidden": 1024, "layers": 4, "intermediate": 2752, "batch": 1, "sequence": 32}
_LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

WORKLOADS = {
    "tiny": Workload(
        "to try the benchmark itself", hidden=64, layers=2, intermediate=128, batch=2, sequence=16
    ),
    "A": Workload("compute-heavy, 33.7 M parameters", **_A),
    "A-bf16": Workload("A in bf16, gradients reduced in fp32", **_A, **_LOW),
    "B": Workload("communication-heavy, 67.4 M parameters", **_B),
    "B-bf16": Workload(
        "B in bf16, on the wire too", **_B, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    ),
    "deep": Workload(
        "33 layers, 300 small parameters",
        hidden=128,
        layers=33,
        intermediate=344,
        batch=2,
        sequence=64,
    ),
    "moe": Workload(
        "a mixture of 8 experts",
        hidden=256,
        layers=4,
        intermediate=512,
        batch=4,
        sequence=64,
        experts=8,
    ),
}

WORKLOADS |= {
    f"depth-{layers}": Workload(
        f"{layers} layers, to compile",
        hidden=256,
        layers=layers,
        intermediate=688,
        batch=2,
        sequence=64,
    )
    for layers in (4, 16, 32)
}

_LLAMA = {"vocabulary": 32768, "sequence": 4096, "attention": "causal", **_LOW}

LLAMAS = {
    "llama-tiny": Workload(
        "to try the benchmark itself",
        hidden=64,
        layers=2,
        intermediate=128,
        batch=2,
        sequence=32,
        vocabulary=512,
        attention="causal",
        **_LOW,
    ),
    "llama-1b": Workload(
        "1.21 G parameters", hidden=2048, layers=16, intermediate=8192, heads=16, batch=4, **_LLAMA
    ),
    "llama-3b": Workload(
        "2.92 G parameters", hidden=3072, layers=24, intermediate=8192, heads=24, batch=2, **_LLAMA
    ),
}
