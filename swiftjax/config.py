"""Frozen configuration: what the model is, and how the engine runs it.

Derived numbers are methods, never written back. `hf_config.py` reads a ModelConfig from a file.
"""

from dataclasses import dataclass, field
from typing import Literal

from swiftjax.errors import InvalidRequestError

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

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens (the token itself included), 0 for full attention."""
        return self.layer_windows[layer] if self.layer_windows else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one step."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_queue_len: int = 1024
    policy: str = "fcfs"
    victim_policy: str = "newest"
    prefix_cache: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How to build an engine. `None` leaves the choice to the device and the checkpoint."""

    model_path: str
    dtype: Dtype | None = None
    max_model_len: int | None = None
    max_batch_size: int | None = None
    max_total_token_num: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    gpu_memory_utilization: float = 0.9
    implementation: str | None = None
    chat_template: str | None = None
    max_queue_len: int = 1024
    policy: str = "fcfs"
    prefix_cache: bool = True
    swap_space_gib: float = 4.0

    def __post_init__(self) -> None:
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidRequestError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must lie in (0, 1]"
            )
        for name, value in (
            ("max_model_len", self.max_model_len),
            ("max_batch_size", self.max_batch_size),
            ("max_total_token_num", self.max_total_token_num),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("page_size", self.page_size),
            ("max_queue_len", self.max_queue_len),
        ):
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} is {value}; it must be a positive integer")
