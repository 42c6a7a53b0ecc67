"""Say in the words of config.json what the metadata of a GGUF file says.

Only what can be said exactly: an option that changes the computation and has no counterpart is
refused by name. All other checks are those of `ModelConfig.from_hf`. Used by `gguf_source`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from swiftjax.converters.gguf_header import GgufTensor
from swiftjax.errors import CheckpointError, UnsupportedError

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Metadata that changes the computation, with the values that leave it as it is.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
# Ends of a chat turn that llama.cpp stops at besides eos_token_id.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
LLAMA3_ORIGINAL_CONTEXT = 8192


def hf_config(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    rope_factors: Float[np.ndarray, " pairs"] | None,
) -> dict[str, Any]:
    """Translate metadata; `rope_factors` are the values of `rope_freqs.weight`, if it is there.

    Raises CheckpointError for missing metadata, UnsupportedError for what has no counterpart.
    """
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"{path} has architecture {arch!r:.80}; GGUF files are read for "
            f"{', '.join(ARCHITECTURES)} (Mistral files say 'llama')"
        )
    own = {
        key.removeprefix(f"{arch}."): value
        for key, value in metadata.items()
        if key.startswith(f"{arch}.")
    }
    _refuse_unknown_options(path, arch, own, metadata)
    heads = _uniform(path, arch, own, "attention.head_count")
    head_dim = own.get("attention.key_length")
    if head_dim is None:
        head_dim = _need(path, arch, own, "embedding_length") // heads
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.get(key, head_dim) != head_dim:
            raise UnsupportedError(f"{path}: {arch}.{key} is {own[key]}; only {head_dim} is run")
    embedding = tensors.get("token_embd.weight")
    vocab_size = own.get("vocab_size", embedding.shape[0] if embedding else None)
    config: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": vocab_size,
        "hidden_size": _need(path, arch, own, "embedding_length"),
        "intermediate_size": _uniform(path, arch, own, "feed_forward_length"),
        "num_hidden_layers": _need(path, arch, own, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(path, arch, own, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _need(path, arch, own, "context_length"),
        "rms_norm_eps": _epsilon(_need(path, arch, own, "attention.layer_norm_rms_epsilon")),
        "rope_theta": own.get("rope.freq_base", 10_000.0),
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            metadata[f"tokenizer.ggml.{key}"]
            for key in EOS_KEYS
            if f"tokenizer.ggml.{key}" in metadata
        ],
    }
    if scaling := _rope_scaling(path, arch, own, config, rope_factors):
        config["rope_scaling"] = scaling
    return config


def _need(path: Path, arch: str, own: Mapping[str, Any], key: str) -> Any:
    if own.get(key) is None:
        raise CheckpointError(f"{path} has no metadata {arch}.{key}")
    return own[key]


def _uniform(
    path: Path, arch: str, own: Mapping[str, Any], key: str, default: int | None = None
) -> int:
    """A number that some files give per layer; the layers must agree."""
    value = own.get(key, default)
    values = value if isinstance(value, list) else [value]
    if not values or any(not isinstance(v, int) or v < 1 for v in values):
        raise CheckpointError(f"{path}: metadata {arch}.{key} is {value!r:.80}, not a count")
    if len(set(values)) > 1:
        raise UnsupportedError(f"{path}: {arch}.{key} differs between layers: {value!r:.200}")
    return values[0]


def _epsilon(value: float) -> float:
    """Undo the float32 storage: 9.999999747e-06 was written as 1e-05."""
    return float(f"{value:.6g}")


def _refuse_unknown_options(
    path: Path, arch: str, own: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    for key, neutral in NEUTRAL.items():
        if key in own and own[key] not in neutral:
            raise UnsupportedError(f"{path}: {arch}.{key} is {own[key]!r:.80}; not supported")
    window = own.get("attention.sliding_window") or 0
    if window and window < _need(path, arch, own, "context_length"):
        raise UnsupportedError(
            f"{path}: {arch}.attention.sliding_window is {window}; GGUF files with a sliding "
            "window are not supported: load the Hugging Face directory instead"
        )
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedError(
            f"{path} is one of {metadata['split.count']} parts; join them first "
            "(llama-gguf-split --merge)"
        )


def _rope_scaling(
    path: Path,
    arch: str,
    own: Mapping[str, Any],
    config: Mapping[str, Any],
    factors: Float[np.ndarray, " pairs"] | None,
) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    factor = own.get("rope.scaling.factor") or 1.0  # llama.cpp reads 0 as "not scaled"
    if "rope.scale_linear" in own and kind == "none":
        kind, factor = "linear", own["rope.scale_linear"]
    original = own.get("rope.scaling.original_context_length")
    if factors is not None and not np.all(factors == 1):
        if kind != "none":
            raise UnsupportedError(f"{path} has both rope_freqs.weight and rope scaling {kind!r}")
        return _llama3_scaling(path, config, factors, original or LLAMA3_ORIGINAL_CONTEXT)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"{path}: {arch}.rope.scaling.type is {kind!r:.80}; not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        scaling["beta_fast"] = own.get("rope.scaling.yarn_beta_fast")
        scaling["beta_slow"] = own.get("rope.scaling.yarn_beta_slow")
    return scaling


def _llama3_scaling(
    path: Path, config: Mapping[str, Any], factors: Float[np.ndarray, " pairs"], original: int
) -> dict[str, Any]:
    """Recognise per-pair divisors as Llama 3 scaling with its published band limits 1 and 4.

    The divisors of the long wavelengths give the factor; all others must then follow.
    """
    factor, low, high = float(np.max(factors)), 1.0, 4.0
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    turns = original / (2 * math.pi) * float(config["rope_theta"]) ** -exponents
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-5, atol=0):
        raise UnsupportedError(
            f"{path}: rope_freqs.weight is not Llama 3 scaling (factor {factor:g}, original "
            f"context {original}, bands 1 and 4): load the Hugging Face directory instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
