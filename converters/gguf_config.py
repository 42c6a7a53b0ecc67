"""Say in the words of config.json what the metadata of a GGUF file says.

Only what can be said exactly: an option that changes the computation and has no counterpart is
refused by name. All other checks are those of `model_config_from_hf`. Used by `gguf_source`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from swiftjax.converters.gguf_header import GgufTensor
from swiftjax.converters.gguf_metadata import GgufMetadata
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
            f"architecture {arch!r:.80} is not supported; GGUF files are read for "
            f"{', '.join(ARCHITECTURES)} (Mistral files say 'llama')"
        )
    own, tokenizer = GgufMetadata(metadata, f"{arch}."), GgufMetadata(metadata, "tokenizer.ggml.")
    _refuse_unknown_options(arch, metadata, own)
    heads = _uniform(own, "attention.head_count")
    eos = [tokenizer.get(key, int) for key in EOS_KEYS]
    config: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": _vocab_size(own, tensors),
        "hidden_size": own.need("embedding_length", int),
        "intermediate_size": _uniform(own, "feed_forward_length"),
        "num_hidden_layers": own.need("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(own, "attention.head_count_kv", heads),
        "head_dim": _head_dim(own, heads),
        "max_position_embeddings": own.need("context_length", int),
        "rms_norm_eps": _shortest(own.need("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": own.number("rope.freq_base") or 10_000.0,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": tokenizer.get("bos_token_id", int),
        "eos_token_id": [token_id for token_id in eos if token_id is not None],
    }
    if scaling := _rope_scaling(own, config, rope_factors):
        config["rope_scaling"] = scaling
    return config


def _vocab_size(own: GgufMetadata, tensors: Mapping[str, GgufTensor]) -> int | None:
    """The number in the metadata, or where it is absent the rows of the embedding."""
    embedding = tensors.get("token_embd.weight")
    vocab_size = own.get("vocab_size", int)
    return embedding.shape[0] if vocab_size is None and embedding is not None else vocab_size


def _head_dim(own: GgufMetadata, heads: int) -> int:
    """Keys, values and the rotary embedding must all have one width."""
    head_dim = own.get("attention.key_length", int) or own.need("embedding_length", int) // heads
    for key in ("rope.dimension_count", "attention.value_length"):
        if (value := own.get(key, int)) not in (None, head_dim):
            raise UnsupportedError(f"{own.name(key)} is {value}; only {head_dim} is supported")
    return head_dim


def _uniform(own: GgufMetadata, key: str, default: int | None = None) -> int:
    """A number that some files give per layer; the layers must agree."""
    value = own.get(key, object)
    value = default if value is None else value
    counts = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
    if not counts or min(counts) < 1 or (isinstance(value, list) and len(counts) != len(value)):
        raise CheckpointError(f"{own.name(key)} is {value!r:.80}, not a positive count")
    if min(counts) != max(counts):
        raise UnsupportedError(f"{own.name(key)} differs between layers: {value!r:.200}")
    return counts[0]


def _shortest(value: float) -> float:
    """Undo the float32 storage: 9.999999747e-06 was written as 1e-05."""
    return float(f"{value:.6g}")


def _refuse_unknown_options(arch: str, metadata: Mapping[str, Any], own: GgufMetadata) -> None:
    for key, neutral in NEUTRAL.items():
        value = metadata.get(f"{arch}.{key}")
        if value is not None and value not in neutral:
            raise UnsupportedError(f"{arch}.{key} is {value!r:.80}; that is not supported")
    window = own.get("attention.sliding_window", int) or 0
    if 0 < window < own.need("context_length", int):
        raise UnsupportedError(
            f"{arch}.attention.sliding_window is {window}; GGUF files with a sliding window are "
            "not supported: load the Hugging Face directory instead"
        )
    if (parts := GgufMetadata(metadata, "split.").get("count", int) or 0) > 1:
        raise UnsupportedError(
            f"the file is one of {parts} parts; join them first (llama-gguf-split --merge)"
        )


def _rope_scaling(
    own: GgufMetadata, config: Mapping[str, Any], factors: Float[np.ndarray, " pairs"] | None
) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", str) or "none"
    factor = own.number("rope.scaling.factor") or 1.0  # llama.cpp reads 0 as "not scaled"
    if kind == "none" and (old := own.number("rope.scale_linear")):
        kind, factor = "linear", old
    original = own.get("rope.scaling.original_context_length", int)
    if factors is not None and not np.all(factors == 1):
        if kind != "none":
            raise UnsupportedError(f"the file has both rope_freqs.weight and rope scaling {kind!r}")
        return _llama3_scaling(config, factors, original or LLAMA3_ORIGINAL_CONTEXT)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"{own.name('rope.scaling.type')} {kind!r:.80} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        scaling["beta_fast"] = own.number("rope.scaling.yarn_beta_fast")
        scaling["beta_slow"] = own.number("rope.scaling.yarn_beta_slow")
    return scaling


def _llama3_scaling(
    config: Mapping[str, Any], factors: Float[np.ndarray, " pairs"], original: int
) -> dict[str, Any]:
    """Recognise per-pair divisors as Llama 3 scaling with its published band limits 1 and 4.

    The divisors of the long wavelengths give the factor; all others must then follow.
    """
    factor, low, high = float(np.max(factors)), 1.0, 4.0
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    turns = original / (2 * math.pi) * float(config["rope_theta"]) ** -exponents
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    # The float32 arithmetic of exporters is 3e-7 away.
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-5, atol=0):
        raise UnsupportedError(
            f"rope_freqs.weight is not Llama 3 scaling (factor {factor:g}, original context "
            f"{original}, bands 1 and 4): load the Hugging Face directory instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
