"""Write tiny random Hugging Face model directories of any family, with numpy and no other help."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

VOCAB_SIZE = 320  # 256 bytes, three special tokens, and ids that no text gives
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)
STORED_AS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
}


def tiny_config(family: str = "llama", **keys: Any) -> Config:
    """A config.json of two small layers; `keys` are added or replaced."""
    sizes = {
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }
    return {**sizes, **keys}


def tiny_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes that transformers' models of this configuration have."""
    family, width, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    mlp, head = config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    attention_bias = config.get("attention_bias", False)
    yield "model.embed_tokens.weight", (vocab, width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, out, into, bias in (
            ("self_attn.q_proj", query, width, attention_bias or family == "qwen2"),
            ("self_attn.k_proj", key, width, attention_bias or family == "qwen2"),
            ("self_attn.v_proj", key, width, attention_bias or family == "qwen2"),
            ("self_attn.o_proj", width, query, attention_bias),
            ("mlp.gate_proj", mlp, width, config.get("mlp_bias", False)),
            ("mlp.up_proj", mlp, width, config.get("mlp_bias", False)),
            ("mlp.down_proj", width, mlp, config.get("mlp_bias", False)),
        ):
            yield f"{prefix}.{name}.weight", (out, into)
            if bias:
                yield f"{prefix}.{name}.bias", (out,)
        if family == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (head,)
            yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.input_layernorm.weight", (width,)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, width)


def tiny_tensors(config: Mapping[str, Any], seed: int = 0, dtype: str = "float32") -> Tensors:
    """Random weights: norms near 1, everything else small enough to keep activations sane."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tiny_shapes(config):
        values = rng.standard_normal(shape) * (0.1 if "norm" in name else shape[-1] ** -0.5)
        tensors[name] = (values + ("norm" in name)).astype(np.dtype(dtype))
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write the safetensors format, 8-bit floats included."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": STORED_AS[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(v).view(np.uint8).tobytes() for v in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: one token per byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    num_shards: int = 1,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write a whole model directory and return it; random weights unless `tensors` are given."""
    tensors = tiny_tensors(config) if tensors is None else tensors
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(dict(generation)))
    write_tokenizer(directory)
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    names = list(tensors)
    per_shard = math.ceil(len(names) / num_shards)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard * per_shard :][:per_shard]}
        write_safetensors(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to bfloat16."""
    return values.astype(ml_dtypes.bfloat16)
