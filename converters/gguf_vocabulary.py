"""The vocabulary of a GGUF file, and the SentencePiece kind of tokenizer over it.

SentencePiece BPE has scores where the tokenizers library has ranked merges; this module turns one
into the other. Used by `gguf_tokenizer` only.
"""

from dataclasses import dataclass
from typing import Any

from swiftjax.converters.gguf_metadata import GgufMetadata
from swiftjax.errors import CheckpointError, UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
_ADVICE = "this is not supported: load the Hugging Face directory of the model instead"


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Tokens and their types, by id."""

    tokens: list[str]
    types: list[int]

    def ids(self) -> dict[str, int]:
        """Id of every token; of equal ones, the last."""
        return {token: i for i, token in enumerate(self.tokens)}

    def of_type(self, *types: int) -> list[int]:
        """Ids of the tokens of these types, in order."""
        return [i for i, kind in enumerate(self.types) if kind in types]


def read_vocabulary(metadata: GgufMetadata) -> Vocabulary:
    """Read tokens and types. Raises CheckpointError when they are missing or do not match."""
    tokens = metadata.list_of("ggml.tokens", str)
    if not tokens:
        raise CheckpointError("GGUF: tokenizer.ggml.tokens is empty")
    return Vocabulary(
        tokens=tokens, types=metadata.list_of("ggml.token_type", int, length=len(tokens))
    )


def sentencepiece_bpe(metadata: GgufMetadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The parts of tokenizer.json that make the tokenizers library merge as SentencePiece does.

    Raises UnsupportedError for text normalisation and user-defined tokens that it cannot express.
    """
    scores = metadata.list_of("ggml.scores", float, length=len(vocabulary.tokens))
    for key in ("ggml.precompiled_charsmap", "ggml.remove_extra_whitespaces"):
        if metadata.get(key, object):
            raise UnsupportedError(f"GGUF: tokenizer.{key} is set; {_ADVICE}")
    for token_id in vocabulary.of_type(USER_DEFINED):
        if "\u2581" in vocabulary.tokens[token_id]:
            raise UnsupportedError(
                f"GGUF: user-defined token {vocabulary.tokens[token_id]!r} has a space; {_ADVICE}"
            )
    unknown = vocabulary.of_type(UNKNOWN)
    add_space = metadata.get("ggml.add_space_prefix", bool) is not False
    prepend = [{"type": "Prepend", "prepend": "\u2581"}] if add_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if add_space else []
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    from_mark = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_mark]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [from_mark, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": vocabulary.tokens[unknown[0]] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary.ids(),
            "merges": merges_from_scores(vocabulary.tokens, scores, vocabulary.of_type(NORMAL)),
        },
    }


def merges_from_scores(
    tokens: list[str], scores: list[float], normal: list[int]
) -> list[tuple[str, str]]:
    """Every way to join two normal pieces into a third, best score first.

    SentencePiece joins the neighbours whose union scores best; a ranked list of pairs says the
    same. Equal scores go by token id, where SentencePiece takes the leftmost.
    """
    pieces = {tokens[i] for i in normal}
    ranked = sorted(normal, key=lambda i: (-scores[i], i))
    return [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in ranked)
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
