"""Tokenizers that several engine tests share."""

from pathlib import Path

import pytest

from swiftjax.converters.gguf_header import read_header
from swiftjax.converters.gguf_tokenizer import tokenizer_files_from_gguf
from swiftjax.engine.tokenizer import Tokenizer
from tests.tiny_tokenizers import LETTERS, byte_level_files, sentencepiece_metadata


@pytest.fixture(scope="session")
def smollm2(demo_gguf: Path) -> Tokenizer:
    """The tokenizer of the demo model."""
    return Tokenizer(tokenizer_files_from_gguf(read_header(demo_gguf).metadata))


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A tiny byte-level BPE with special and plain added tokens."""
    extra = [("<pad >", True), ("<tool call>", False), ("é", False)]
    return Tokenizer(byte_level_files(extra_tokens=extra))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """A tiny SentencePiece tokenizer with byte fallback and the dummy prefix."""
    pieces = [("\u2581", -10.0), *((char, -11.0) for char in LETTERS)]
    pieces += [("\u2581a", -1.0), ("ab", -2.0), ("\u2581\u2581", -3.0), ("é", -12.0)]
    return Tokenizer(tokenizer_files_from_gguf(sentencepiece_metadata(pieces)))
