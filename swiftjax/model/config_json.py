"""config.json files: read one, make a ModelConfig of it with errors that name the file, write one.

`to_hf` is the inverse of `model_config_from_hf`: reading what it wrote gives an equal ModelConfig.
Knows no tensors. Used by `checkpoint` and by the converters.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swiftjax.errors import CheckpointError, InvalidRequestError
from swiftjax.hf_config import QUANT_METHOD, model_config_from_hf
from swiftjax.model_config import FAMILIES, ModelConfig, RopeConfig
from swiftjax.quantization import Quantization

MAX_JSON_BYTES = 64 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold one object. Raises CheckpointError naming the file."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_model_config(
    path: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Make a ModelConfig of the configuration found at `path`.

    Raises CheckpointError for missing or broken values, and UnsupportedError as it stands.
    """
    try:
        return model_config_from_hf(config, generation)
    except InvalidRequestError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: the configuration is broken: {error}") from error


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Give the config.json of a model; end-of-sequence ids of both HF files go into it."""
    described = {
        "architectures": [FAMILIES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _rope_parameters(config.rope),
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": config.dtype,
    }
    return described | _windows(config) | _quantization(config.quantization)


def _quantization(quantization: Quantization | None) -> dict[str, Any]:
    if quantization is None:
        return {}
    return {
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            "kind": quantization.kind,
            "group_size": quantization.group_size,
            "keep": list(quantization.keep),
            "static_activations": quantization.static_activations,
            "act_order": quantization.act_order,
        }
    }


def _windows(config: ModelConfig) -> dict[str, Any]:
    """Sliding windows; Mistral reads an absent key as 4096, so null is written."""
    if not config.layer_windows:
        return {"sliding_window": None}
    # Windows of 0 on every layer need some positive number to be read back as layer types.
    window = max(config.layer_windows) or config.max_position
    if config.family == "mistral":
        return {"sliding_window": window}
    kinds = ["sliding_attention" if size else "full_attention" for size in config.layer_windows]
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    parameters = {
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
        "attention_factor": rope.attention_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
        "truncate": rope.truncate,
    }
    return {key: value for key, value in parameters.items() if value is not None}
