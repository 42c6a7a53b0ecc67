"""Reads a Hugging Face config.json into a ModelConfig.

Refuses by name what the model code does not compute, so that a checkpoint either runs exactly or
not at all. Knows no files; called by the checkpoint readers.
"""

from collections.abc import Mapping
from typing import Any

from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.hf_rope import read_rope
from swiftjax.model_config import DTYPES, FAMILIES, Dtype, ModelConfig
from swiftjax.quantization import QUANT_TYPES, Quantization

QUANT_METHOD = "swiftjax"  # in the quantization_config of a native checkpoint


def model_config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read a Hugging Face config.json (and generation_config.json).

    Raises UnsupportedError for an architecture, rope kind or option the model code lacks, and
    InvalidRequestError for a missing or impossible number.
    """
    family = _family(config)
    _refuse_unknown_options(config, family)
    hidden_size = _positive_int(config, "hidden_size")
    num_layers = _positive_int(config, "num_hidden_layers")
    num_heads, num_kv_heads, head_dim = _heads(config, family, hidden_size)
    max_position = _positive_int(config, "max_position_embeddings")
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=_positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
        rope=read_rope(config, max_position),
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
        output_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        layer_windows=_layer_windows(config, family, num_layers),
        bos_token_id=config.get("bos_token_id", 1 if family in ("llama", "mistral") else None),
        eos_token_ids=_eos_token_ids(config, generation or {}, family),
        dtype=_dtype(config),
        quantization=_quantization(config),
    )


def _family(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type in FAMILIES:
        return str(model_type)
    architectures = config.get("architectures") or []
    for family, architecture in FAMILIES.items():
        if model_type is None and architecture in architectures:
            return family
    raise UnsupportedError(
        f"model_type {model_type!r} (architectures {list(architectures)}) is not supported; "
        f"SwiftJAX runs {', '.join(sorted(FAMILIES))} (SmolLM2 and TinyLlama are 'llama')"
    )


def _refuse_unknown_options(config: Mapping[str, Any], family: str) -> None:
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedError(
            f"hidden_act {act!r} is not supported; the {family} model computes 'silu'"
        )
    if (method := _quantization_block(config).get("quant_method")) not in (None, QUANT_METHOD):
        raise UnsupportedError(
            f"the checkpoint is quantised ({method}); give the unquantised checkpoint instead"
        )


def _quantization_block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("quantization_config") or {}


def _quantization(config: Mapping[str, Any]) -> Quantization | None:
    block = _quantization_block(config)
    if not block:
        return None
    try:
        kind = QUANT_TYPES[QUANT_TYPES.index(block["kind"])]
        keep = tuple(str(pattern) for pattern in block["keep"])
        return Quantization(
            kind=kind,
            group_size=int(block["group_size"]),
            keep=keep,
            act_order=bool(block.get("act_order", False)),
            static_activations=bool(block.get("static_activations", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"quantization_config is broken: {error!r}") from error


def _positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequestError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _positive_float(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidRequestError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _heads(config: Mapping[str, Any], family: str, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, KV heads and the width of one."""
    num_heads = _positive_int(config, "num_attention_heads")
    num_kv_heads = _num_kv_heads(config, family, num_heads)
    if num_heads % num_kv_heads:
        raise InvalidRequestError(
            f"num_attention_heads ({num_heads}) is not a multiple of "
            f"num_key_value_heads ({num_kv_heads}) in config.json"
        )
    default = 128 if family == "qwen3" else hidden_size // num_heads
    head_dim = _positive_int(config, "head_dim", default)
    if head_dim % 2:
        raise UnsupportedError(f"head_dim is {head_dim}; rotary embedding needs an even head_dim")
    return num_heads, num_kv_heads, head_dim


def _num_kv_heads(config: Mapping[str, Any], family: str, num_heads: int) -> int:
    # An explicit null means "as many as query heads"; an absent key means the class's own default.
    absent = {"llama": num_heads, "mistral": 8, "qwen2": 32, "qwen3": 32}[family]
    return _positive_int(
        config, "num_key_value_heads", num_heads if "num_key_value_heads" in config else absent
    )


def _layer_windows(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int, ...]:
    # HF's config classes give an absent key 4096; only an explicit null means full attention.
    window = config.get("sliding_window", 4096)
    if family == "llama" or not window:
        return ()
    if family == "mistral":
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return ()
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", 28))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedError(
            f"layer_types {kinds!r:.200} does not describe {num_layers} known layers"
        )
    return tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)


def _eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], family: str
) -> tuple[int, ...]:
    """Unite both files: either may name one id, a list or nothing.

    Where neither has the key at all, the default of HF's config class holds.
    """
    if "eos_token_id" not in config and "eos_token_id" not in generation:
        return (2,) if family in ("llama", "mistral") else ()
    ids: dict[int, None] = {}
    for source in (generation, config):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list | tuple) else [value]:
            if token_id is not None:
                ids[int(token_id)] = None
    return tuple(ids)


def _dtype(config: Mapping[str, Any]) -> Dtype | None:
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise UnsupportedError(f"dtype {value!r} in config.json is not one of {', '.join(DTYPES)}")
