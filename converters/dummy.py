"""A model of random weights and a tokenizer of made-up words, for speed and memory only.

The shape is one of `shapes.py`, or that of a Hugging Face directory, whose tokenizer is then used.
Called by `build.py` for `load_format="dummy"`.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from swiftjax.converters.load import OpenCheckpoint
from swiftjax.converters.quantize import with_quantization
from swiftjax.errors import InvalidRequestError
from swiftjax.hf_config import model_config_from_hf
from swiftjax.model.params import abstract_params, random_params, weight_bytes
from swiftjax.model_config import Dtype, ModelConfig
from swiftjax.quantization import Quantization
from swiftjax.shapes import SHAPES
from swiftjax.tokenizer_files import TokenizerFiles, read_tokenizer_files


def open_dummy(
    name_or_path: str, *, dtype: Dtype | None, quantization: Quantization | None = None
) -> OpenCheckpoint:
    """A model whose weights are drawn, on the default device, when they are read.

    Raises InvalidRequestError for an unknown name.
    """
    config, files = dummy_model(name_or_path)
    config = with_quantization(config, quantization)
    config = replace(config, dtype=dtype or config.dtype or "float32")
    params = abstract_params(config, jnp.dtype(config.dtype or "float32"))
    return OpenCheckpoint(
        config=config,
        num_params=sum(math.prod(x.shape) for x in params.values()),
        num_bytes=weight_bytes(config),
        tensors=lambda done: _random_tensors(config),
        tokenizer_files=files,
    )


def _random_tensors(config: ModelConfig) -> Iterator[tuple[str, jax.Array]]:
    yield from random_params(config, jnp.dtype(config.dtype or "float32")).items()


def dummy_model(name_or_path: str) -> tuple[ModelConfig, TokenizerFiles]:
    """The shape and the tokenizer, without any weight."""
    if (shape := SHAPES.get(name_or_path)) is not None:
        return shape, _made_up_words(shape.vocab_size)
    path = Path(name_or_path)
    if not (path / "config.json").is_file():
        raise InvalidRequestError(
            f"{name_or_path!r} is neither a directory with a config.json nor one of the shapes "
            f"{', '.join(SHAPES)}"
        )
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return model_config_from_hf(config), read_tokenizer_files(path)


def _made_up_words(count: int) -> TokenizerFiles:
    vocab = {f"\u2581w{i}": i for i in range(count)}
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "\u2581w0"},
        "pre_tokenizer": spaces,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "Fuse"}]},
    }
    return TokenizerFiles(tokenizer_json=json.dumps(whole), config={}, chat_template=None)
