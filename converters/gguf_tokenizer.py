"""The tokenizer inside a GGUF file, rewritten as a tokenizer.json of the tokenizers library.

Reads metadata only, no tensors. Two kinds are known: `gpt2` (byte-level BPE, told apart by its
pre-tokenizer) and `llama` (SentencePiece BPE); everything else is refused by name. Called by the
GGUF loader.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swiftjax.converters.gguf_metadata import GgufMetadata
from swiftjax.converters.gguf_vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
    sentencepiece_bpe,
)
from swiftjax.errors import CheckpointError, UnsupportedError
from swiftjax.tokenizer_files import TokenizerFiles

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizer:
    """How a family of byte-level BPE cuts text before merging, and its defaults."""

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False  # where the file has no tokenizer.ggml.add_bos_token


def _split_by(regex: str) -> tuple[dict[str, Any], ...]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return (split, _byte_level(use_regex=False))


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": use_regex,
    }


# The names of `tokenizer.ggml.pre`, with the values that the models' own tokenizer.json have.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "llama-bpe": PreTokenizer(
        steps=_split_by(_WORDS % r"\p{N}{1,3}"), ignore_merges=True, add_bos=True
    ),
    "qwen2": PreTokenizer(steps=_split_by(_WORDS % r"\p{N}"), normalizer={"type": "NFC"}),
    "smollm": PreTokenizer(
        steps=({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
    ),
}
_SUPPORTED = (
    f"supported are 'gpt2' with tokenizer.ggml.pre {', '.join(sorted(PRE_TOKENIZERS))}, "
    "and 'llama' (SentencePiece). Load the Hugging Face directory of the model instead"
)


def tokenizer_files_from_gguf(values: Mapping[str, Any]) -> TokenizerFiles:
    """Build the tokenizer files from the metadata of a GGUF file (`gguf_header.read_header`).

    Raises UnsupportedError for a kind or pre-tokenizer that is not known and CheckpointError for
    metadata that is missing, of a wrong type or inconsistent.
    """
    metadata = GgufMetadata(values, "tokenizer.")
    kind = metadata.need("ggml.model", str)
    if kind == "gpt2":
        pre = metadata.get("ggml.pre", str)
        if pre not in PRE_TOKENIZERS:
            raise UnsupportedError(f"GGUF: tokenizer 'gpt2' with pre {pre!r}; {_SUPPORTED}")
        vocabulary = read_vocabulary(metadata)
        spec, add_bos = _byte_level_bpe(metadata, vocabulary, PRE_TOKENIZERS[pre])
    elif kind == "llama":
        vocabulary = read_vocabulary(metadata)
        spec, add_bos = sentencepiece_bpe(metadata, vocabulary), True
    else:
        raise UnsupportedError(f"GGUF: tokenizer {kind!r}; {_SUPPORTED}")
    config = _config(metadata, vocabulary, default_add_bos=add_bos, is_llama=kind == "llama")
    spec |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(config, vocabulary),
    }
    return TokenizerFiles(
        tokenizer_json=json.dumps(spec, ensure_ascii=False),
        config=config,
        chat_template=metadata.get("chat_template", str),
    )


def _byte_level_bpe(
    metadata: GgufMetadata, vocabulary: Vocabulary, pre: PreTokenizer
) -> tuple[dict[str, Any], bool]:
    ids = vocabulary.ids()
    merges = [merge.split(" ") for merge in metadata.list_of("ggml.merges", str)]
    for merge in merges:
        if len(merge) != 2 or not {merge[0], merge[1], "".join(merge)} <= ids.keys():
            raise CheckpointError(
                f"GGUF: merge {' '.join(merge)!r:.80} in tokenizer.ggml.merges does not join two "
                "tokens into a third"
            )
    spec = {
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignore_merges,
            "vocab": ids,
            "merges": merges,
        },
    }
    return spec, pre.add_bos


def _config(
    metadata: GgufMetadata, vocabulary: Vocabulary, *, default_add_bos: bool, is_llama: bool
) -> dict[str, Any]:
    """The contents of tokenizer_config.json: special tokens and where BOS and EOS go."""
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if is_llama else {}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"ggml.{key}_token_id", int)
        token_id = defaults.get(key) if token_id is None else token_id
        if token_id is None:
            continue
        if not 0 <= token_id < len(vocabulary.tokens):
            raise CheckpointError(
                f"GGUF: tokenizer.ggml.{key}_token_id is {token_id}; the vocabulary has "
                f"{len(vocabulary.tokens)} tokens"
            )
        config[f"{name}_token"] = vocabulary.tokens[token_id]
    for name, default in (("bos", default_add_bos), ("eos", False)):
        flag = metadata.get(f"ggml.add_{name}_token", bool)
        config[f"add_{name}_token"] = default if flag is None else flag
        if config[f"add_{name}_token"] and f"{name}_token" not in config:
            raise CheckpointError(
                f"GGUF: add_{name}_token is set but tokenizer.ggml.{name}_token_id is missing"
            )
    return config


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are cut out of the text before anything else; control tokens are special."""
    return [
        {
            "id": i,
            "content": vocabulary.tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.types[i] != USER_DEFINED,
        }
        for i in vocabulary.of_type(UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _post_processor(config: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any] | None:
    names = [name for name in ("bos", "eos") if config[f"add_{name}_token"]]
    if not names:
        return None
    tokens, ids = {name: config[f"{name}_token"] for name in names}, vocabulary.ids()
    parts = {name: {"SpecialToken": {"id": token, "type_id": 0}} for name, token in tokens.items()}
    single = [
        *([parts["bos"]] if "bos" in parts else []),
        {"Sequence": {"id": "A", "type_id": 0}},
        *([parts["eos"]] if "eos" in parts else []),
    ]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]}
            for token in tokens.values()
        },
    }
