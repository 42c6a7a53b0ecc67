"""What a model is: one member of the LLaMA family, described by numbers and flags.

Frozen; derived numbers are methods. `hf_config.py` reads a ModelConfig from a checkpoint's
config.json, `shapes.py` has some by name.
"""

from dataclasses import dataclass, field
from typing import Literal

from swiftjax.quantization import Quantization, WeightFormat

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")

# model_type in config.json -> the class name HF gives the causal model
FAMILIES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding and its scaling; fields not used by a kind are ignored."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One member of the LLaMA family, described completely by numbers and flags."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    layer_windows: tuple[int, ...] = ()  # per layer: tokens attended, 0 = all; () = all layers full
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: Dtype | None = None  # as the checkpoint names it
    quantization: Quantization | None = None

    def weight_format(self, name: str) -> WeightFormat | None:
        """How a projection is stored, by its name (`layers.0.mlp.down`); None: in `dtype`."""
        return self.quantization.format_of(name) if self.quantization else None

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens (the token itself included), 0 for full attention."""
        return self.layer_windows[layer] if self.layer_windows else 0
