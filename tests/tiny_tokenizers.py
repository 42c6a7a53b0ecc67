"""Small tokenizers for tests: byte-level BPE as files, either kind as GGUF metadata."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from swiftjax.tokenizer_files import TokenizerFiles

SPECIALS = ("<s>", "</s>", "<|user|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("ð", "Ł"))
LETTERS = "abcdef"
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
CONTROL_TYPE, NORMAL_TYPE, UNKNOWN_TYPE, BYTE_TYPE, USER_TYPE = 3, 1, 2, 6, 4


def byte_level_tokens() -> list[str]:
    """Special tokens, the 256 byte characters, then one token per merge."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIALS, *alphabet, *(left + right for left, right in MERGES)]


def byte_level_files(
    *,
    config: Mapping[str, Any] | None = None,
    post_processor: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    extra_tokens: Sequence[tuple[str, bool]] = (),
    **overrides: Any,
) -> TokenizerFiles:
    """Files of a byte-level BPE; extra tokens are (text, special); overrides replace top keys."""
    tokens = byte_level_tokens()
    added = [(i, text, True) for i, text in enumerate(SPECIALS)]
    added += [(len(tokens) + i, text, special) for i, (text, special) in enumerate(extra_tokens)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    spec = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i, "content": text, "special": special, "normalized": False,
                "single_word": False, "lstrip": False, "rstrip": False,
            }
            for i, text, special in added
        ],
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": post_processor,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(merge) for merge in MERGES],
        },
    }  # fmt: skip
    return TokenizerFiles(
        tokenizer_json=json.dumps(spec | overrides),
        config={"bos_token": "<s>", "eos_token": "</s>"} if config is None else dict(config),
        chat_template=chat_template,
    )


def bos_processor(*, bos: bool = True, eos: bool = False) -> dict[str, Any]:
    """A post-processor that writes BOS before and EOS after a text."""
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if bos:
        parts.insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    if eos:
        parts.append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    return {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            text: {"id": text, "ids": [SPECIALS.index(text)], "tokens": [text]}
            for text in ("<s>", "</s>")
        },
    }


def byte_level_metadata(pre: str | None = "smollm", **changes: Any) -> dict[str, Any]:
    """GGUF metadata of the byte-level BPE above."""
    tokens = byte_level_tokens()
    types = [CONTROL_TYPE] * len(SPECIALS) + [NORMAL_TYPE] * (len(tokens) - len(SPECIALS))
    metadata = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": [" ".join(merge) for merge in MERGES],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
    }
    return _with_changes(metadata, changes)


def sentencepiece_metadata(pieces: Sequence[tuple[str, float]], **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece vocabulary: <unk> <s> </s>, 256 bytes, then the pieces."""
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *(piece for piece, _ in pieces)]
    types = [UNKNOWN_TYPE, CONTROL_TYPE, CONTROL_TYPE, *[BYTE_TYPE] * 256]
    metadata = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": tokens,
        "ggml.scores": [0.0] * 259 + [float(score) for _, score in pieces],
        "ggml.token_type": types + [NORMAL_TYPE] * len(pieces),
    }
    return _with_changes(metadata, changes)


def _with_changes(metadata: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as in a file; a change is named with `__` for the dot, and None leaves a key out."""
    changed = {**metadata, **{key.replace("__", "."): value for key, value in changes.items()}}
    return {f"tokenizer.{key}": value for key, value in changed.items() if value is not None}
