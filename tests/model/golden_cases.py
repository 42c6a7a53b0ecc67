"""Which tiny models the golden files hold, as plain config.json contents. No torch, no jax."""

from collections.abc import Iterator
from typing import Any

Config = dict[str, Any]

_SIZES: Config = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3_BAND = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", **_LLAMA3_BAND}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _case(model_type: str, **keys: Any) -> Config:
    return {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "torch_dtype": "float32",
        **_SIZES,
        **keys,
    }


# name -> (number of tokens, config.json)
MODELS: dict[str, tuple[int, Config]] = {
    "llama-1": (24, _case("llama", num_key_value_heads=4, rms_norm_eps=1e-6)),
    "llama-2-one-kv-head": (24, _case("llama", num_key_value_heads=1)),
    "llama-3": (40, _case("llama", rope_theta=5e5)),
    "llama-3.1": (150, _case("llama", rope_theta=5e5, rope_scaling=_LLAMA3)),
    "llama-3.2-tied": (
        150,
        _case("llama", tie_word_embeddings=True, head_dim=16,
              rope_parameters={**_LLAMA3, "rope_theta": 5e5, "factor": 32.0}),
    ),
    "llama-biases": (24, _case("llama", attention_bias=True, mlp_bias=True)),
    "llama-linear": (40, _case("llama", rope_scaling={"type": "linear", "factor": 3.0})),
    "llama-dynamic": (
        150,
        _case("llama", max_position_embeddings=64,
              rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}),
    ),
    "llama-yarn": (150, _case("llama", rope_parameters={**_YARN, "rope_theta": 1e4})),
    "llama-yarn-mscale": (
        100,
        _case("llama", head_dim=24,
              rope_parameters={**_YARN, "rope_theta": 1e6, "mscale": 0.707, "mscale_all_dim": 1.2,
                               "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
    ),
    "tinyllama": (24, _case("llama", num_attention_heads=8, hidden_size=64)),
    "smollm2": (
        40,
        _case("llama", tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=1,
              hidden_size=48, rope_theta=1e5),
    ),
    "mistral-window": (40, _case("mistral", sliding_window=7)),
    "mistral-full": (
        40, _case("mistral", head_dim=20, rope_theta=1e6, sliding_window=None)
    ),
    "qwen2": (24, _case("qwen2", rope_theta=1e6, tie_word_embeddings=True)),
    "qwen2-windows": (
        40,
        _case("qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=6,
              max_window_layers=1),
    ),
    "qwen2-yarn": (
        150,
        _case("qwen2", rope_theta=1e6,
              rope_scaling={"type": "yarn", "factor": 4.0, "attention_factor": 1.1,
                            "original_max_position_embeddings": 32}),
    ),
    "qwen3": (24, _case("qwen3", head_dim=12, rope_theta=1e6)),
    "qwen3-layer-types": (
        40,
        _case("qwen3", head_dim=16, num_hidden_layers=3, attention_bias=True,
              use_sliding_window=True, sliding_window=5, tie_word_embeddings=True,
              layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
}  # fmt: skip

# Every key that a config class can fill in by itself, with a value that is nobody's default.
_OPTIONAL: Config = {
    "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 3e-5, "tie_word_embeddings": True,
    "attention_bias": True, "mlp_bias": True, "rope_theta": 12345.0, "hidden_act": "silu",
    "use_sliding_window": True, "sliding_window": 77, "max_window_layers": 1, "bos_token_id": 5,
    "eos_token_id": [7, 9], "rope_scaling": {"type": "linear", "factor": 2.0},
}  # fmt: skip
_NULLABLE = ("sliding_window", "bos_token_id", "eos_token_id", "rope_scaling")
_NULLABLE_TOO = {
    "llama": ("num_key_value_heads", "head_dim"),
    "mistral": ("head_dim",),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads",),
}
_ROPES: dict[str, Config] = {
    "theta on top": {"rope_theta": 5e5},
    "theta inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "theta on both sides": {
        "rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "theta nowhere": {"rope_parameters": {"rope_type": "default"}},
    "linear, old key": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 3}},
    "dynamic": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "dynamic, a length that is not read": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0,
                         "original_max_position_embeddings": 64},
    },
    "llama3": {"rope_parameters": {**_LLAMA3, "rope_theta": 5e5}},
    "llama3, old key, theta on top": {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "llama3", **_LLAMA3_BAND},
    },
    "llama3 without the original length": {
        "rope_parameters": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0,
                            "high_freq_factor": 3.0, "rope_theta": 1e4},
    },
    "yarn": {"rope_theta": 1e6, "rope_scaling": _YARN},
    "yarn, original length on top": {
        "rope_theta": 1e6, "original_max_position_embeddings": 128,
        "rope_scaling": {**_YARN, "original_max_position_embeddings": 32},
    },
    "yarn, all options": {
        "rope_parameters": {**_YARN, "rope_theta": 1e5, "beta_fast": 20, "beta_slow": 2,
                            "mscale": 0.9, "mscale_all_dim": 0.5, "truncate": False},
    },
    "yarn, nulls": {
        "rope_parameters": {**_YARN, "rope_theta": 1e5, "attention_factor": None, "mscale": 1.0,
                            "beta_fast": None, "beta_slow": None, "mscale_all_dim": 0.0},
    },
    "yarn, factor given": {"rope_parameters": {**_YARN, "attention_factor": 0.8}},
    "yarn without the original length": {
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
    },
}  # fmt: skip


def config_variants() -> Iterator[tuple[str, Config]]:
    """Yield named config.json contents: each optional key absent, null, and every rope spelling."""
    for family in _ARCHITECTURES:
        # As many heads as the class defaults of 8 and 32 KV heads need.
        case = _case(family, num_attention_heads=32, hidden_size=512)
        sizes = {k: v for k, v in case.items() if k not in _OPTIONAL}
        full = {**sizes, **_OPTIONAL}
        yield f"{family}: only sizes", sizes
        yield f"{family}: everything", full
        for key in _OPTIONAL:
            yield f"{family}: no {key}", {k: v for k, v in full.items() if k != key}
        for key in (*_NULLABLE, *_NULLABLE_TOO[family]):
            yield f"{family}: null {key}", {**full, key: None}
        yield f"{family}: no layer limit", {
            **{k: v for k, v in full.items() if k != "max_window_layers"}, "num_hidden_layers": 30
        }  # fmt: skip
    for name, rope in _ROPES.items():
        yield f"rope: {name}", {**_case("llama"), **rope}
