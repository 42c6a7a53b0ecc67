"""Write tiny GGUF files from Hugging Face tensors, the way llama.cpp's exporter lays them out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from tokenizers import pre_tokenizers

from swiftjax.converters.gguf_source import gguf_name
from tests.tiny_checkpoints import tiny_config

Quantized = tuple[np.ndarray, GGMLQuantizationType]


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row k*H/2+i of a head goes to row 2i+k, as llama.cpp wants q and k of LLaMA models."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def wide_config(family: str = "llama", **keys: Any) -> dict[str, Any]:
    """Rows of 256, which every quantisation can hold."""
    return tiny_config(
        family, hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1, **keys
    )


def quantize(values: np.ndarray, quantization: GGMLQuantizationType) -> Quantized:
    """Quantise as the gguf package does; norms and biases always stay float32."""
    if values.ndim == 1:
        quantization = GGMLQuantizationType.F32
    return gguf.quantize(values, quantization), quantization


def tiny_metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What an exporter writes about a model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<pad>", "<s>", "</s>", "ab", "cd"]
    tokens += [f"<extra_{i}>" for i in range(config["vocab_size"] - len(tokens))]
    return {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": float(config.get("rope_theta", 10_000.0)),
        f"{arch}.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Quantized] | None = None,
) -> Path:
    """Write a file of the architecture of `config["model_type"]`.

    `metadata` replaces keys (None drops one); `extra` replaces or adds tensors by GGUF name, stored
    bytes as they are.
    """
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    values = {**tiny_metadata(arch, config), **(metadata or {})}
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    stored: dict[str, Quantized] = {}
    for name, tensor in tensors.items():
        for part, count in heads.items():
            if arch == "llama" and f".{part}_proj." in name:
                tensor = permute(tensor, count)
        stored[gguf_name(name)] = quantize(tensor, quantization)
    for name, (data, kind) in {**stored, **(extra or {})}.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    item = _kind(value[0]) if isinstance(value, list) and value else None
    writer.add_key_value(key, value, _kind(value), sub_type=item)


def _kind(value: Any) -> GGUFValueType:
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
        list: GGUFValueType.ARRAY,
    }
    return kinds[type(value)]
