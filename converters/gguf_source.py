"""A GGUF file, shown with Hugging Face names and layouts; weights are dequantised to float32.

llama.cpp stores the q and k rows of LLaMA models with the two halves of each rotary pair side by
side; they are put back here. Used by `load`.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from jaxtyping import Float32

from swiftjax.converters.gguf_config import hf_config
from swiftjax.converters.gguf_header import GgufTensor, read_header
from swiftjax.converters.gguf_tokenizer import tokenizer_files_from_gguf
from swiftjax.converters.safetensors_io import read_bytes
from swiftjax.converters.source import TensorInfo
from swiftjax.errors import CheckpointError, UnsupportedError
from swiftjax.model_config import Dtype
from swiftjax.tokenizer_files import TokenizerFiles

ROPE_FACTORS = "rope_freqs.weight"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_OF_OURS = {theirs: ours for ours, theirs in LAYER_NAMES.items()}
NAME_OF_OURS = {theirs: ours for ours, theirs in NAMES.items()}


class GgufSource:
    """Implements CheckpointSource. Raises CheckpointError or UnsupportedError naming the file."""

    file_dtype: Dtype | None = None  # quantised files say nothing about the arithmetic

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self._metadata = header.metadata
        self._stored = {hf_name(name): tensor for name, tensor in header.tensors.items()}
        if len(self._stored) < len(header.tensors):
            raise CheckpointError(f"{path} has tensors under both GGUF and Hugging Face names")
        self._permuted = header.metadata.get("general.architecture") == "llama"
        factors = self._stored.pop(ROPE_FACTORS, None)
        rope_factors = None if factors is None else self._dequantize(ROPE_FACTORS, factors).ravel()
        with self._naming_the_file():
            self.config: Mapping[str, Any] = hf_config(
                header.metadata, header.tensors, rope_factors
            )
        self.generation: Mapping[str, Any] = {}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(stored.shape, np.dtype(np.float32))
            for name, stored in self._stored.items()
        }

    def label(self, name: str) -> str:
        """The GGUF name."""
        return gguf_name(name)

    def read(self, name: str) -> Float32[np.ndarray, "..."]:
        """Read and dequantise one tensor; q and k rows in Hugging Face order."""
        values = self._dequantize(name, self._stored[name])
        if self._permuted and ".q_proj." in name:
            return unpermute(values, self.config["num_attention_heads"])
        if self._permuted and ".k_proj." in name:
            return unpermute(values, self.config["num_key_value_heads"])
        return values

    def tokenizer_files(self) -> TokenizerFiles:
        """Build the tokenizer's files from the metadata."""
        with self._naming_the_file():
            return tokenizer_files_from_gguf(self._metadata)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"{self.path}: {error}") from error

    def _dequantize(self, name: str, stored: GgufTensor) -> Float32[np.ndarray, "..."]:
        data = read_bytes(self.path, stored.offset, stored.num_bytes)
        if stored.quantization not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            data = data.reshape(*stored.shape[:-1], -1)
        with np.errstate(all="ignore"):
            values = gguf.dequantize(data, stored.quantization).reshape(stored.shape)
        # max and min pass on a NaN, and take far less time than looking at every element
        if values.size and not np.isfinite([values.max(), values.min()]).all():
            raise CheckpointError(f"{self.path}: tensor {gguf_name(name)} is not finite: broken")
        return values


def unpermute(
    values: Float32[np.ndarray, "rows ..."], num_heads: int
) -> Float32[np.ndarray, "rows ..."]:
    """Undo llama.cpp's row order: row 2i+k of a head of H rows goes to row k*H/2+i."""
    if values.shape[0] % (2 * num_heads):
        return values  # misshapen: the report of all shapes will say so
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without one stays as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, stem, kind = match.groups()
        if stem in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[stem]}.{kind}"
    stem, _, kind = name.partition(".")
    return f"{NAMES[stem]}.{kind}" if stem in NAMES else name


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor; a name without one stays as it is."""
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        layer, part = match.groups()
        return f"blk.{layer}.{LAYER_OF_OURS[part]}.{kind}" if part in LAYER_OF_OURS else name
    return f"{NAME_OF_OURS[stem]}.{kind}" if stem in NAME_OF_OURS else name
