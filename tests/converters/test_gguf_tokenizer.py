"""Tokenizers read from GGUF metadata: what each kind does to a text, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from swiftjax.converters.gguf_tokenizer import tokenizer_files_from_gguf
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import CheckpointError, SwiftJaxError, UnsupportedError
from swiftjax.tokenizer_files import read_tokenizer_files, write_tokenizer_files
from tests.tiny_tokenizers import (
    BYTE_TOKENS,
    NORMAL_TYPE,
    USER_TYPE,
    byte_level_metadata,
    byte_level_tokens,
    sentencepiece_metadata,
)

SPACE = "\u2581"
# Scores make the order of joins: " a" first, then "bc", then "ab", then " ab".
PIECES = [
    (SPACE, -20.0), ("a", -21.0), ("b", -22.0), ("c", -23.0), ("d", -24.0),
    (SPACE + "a", -1.0), ("bc", -2.0), ("ab", -3.0), (SPACE + "ab", -4.0), ("abcd", -5.0),
]  # fmt: skip


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """Encoded text, each token by what it writes (bytes read as Latin-1)."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.token_bytes(i, skip_special_tokens=False).decode("latin-1") for i in ids]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a12 345", ["a", "1", "2", " ", "3", "4", "5"]),
        ("qwen2", "a12 345", ["a", "1", "2", " ", "3", "4", "5"]),
        ("llama-bpe", "a12 3456", ["a", "12", " ", "345", "6"]),
        ("smollm", "I'LL", ["I", "'", "LL"]),
        ("qwen2", "I'LL", ["I", "'LL"]),
        ("llama-bpe", "I'LL", ["I", "'LL"]),
        ("smollm", "x\n\n y", ["x", "\n\n", " y"]),
        ("qwen2", "!\n\n y", ["!\n\n", " y"]),
        ("llama-bpe", "(word", ["(word"]),
        ("smollm", "(word", ["(", "word"]),
    ],
)
def test_where_byte_level_text_is_cut(pre: str, text: str, pieces: list[str]) -> None:
    """Every part of the text is in the vocabulary and can be joined: only cuts separate tokens."""
    chars = text.replace(" ", "Ġ").replace("\n", "Ċ")
    ends = range(2, len(chars) + 1)
    joins = [(chars[i : j - 1], chars[j - 1]) for i in range(len(chars)) for j in ends if j > i + 1]
    merges = list(dict.fromkeys(" ".join(join) for join in joins))
    tokens = [*byte_level_tokens(), *(merge.replace(" ", "") for merge in merges)]
    metadata = byte_level_metadata(
        pre,
        ggml__tokens=tokens,
        ggml__merges=merges,
        ggml__token_type=[3, 3, 3] + [NORMAL_TYPE] * (len(tokens) - 3),
    )
    assert _pieces(Tokenizer(tokenizer_files_from_gguf(metadata)), text) == pieces


def test_qwen2_normalises_and_smollm_does_not() -> None:
    decomposed = "e\u0301"
    for pre, expected in (("qwen2", "é"), ("smollm", decomposed)):
        tokenizer = Tokenizer(tokenizer_files_from_gguf(byte_level_metadata(pre)))
        assert tokenizer.decode(tokenizer.encode(decomposed)) == expected


def test_llama_bpe_takes_a_whole_word_without_merges() -> None:
    tokens = [*byte_level_tokens(), "xyz"]
    types = [3, 3, 3] + [NORMAL_TYPE] * (len(tokens) - 3)
    changes = {"ggml__tokens": tokens, "ggml__token_type": types}
    llama = Tokenizer(tokenizer_files_from_gguf(byte_level_metadata("llama-bpe", **changes)))
    assert _pieces(llama, "xyz") == ["xyz"]
    assert _pieces(Tokenizer(tokenizer_files_from_gguf(byte_level_metadata(**changes))), "xyz") == [
        *"xyz"
    ]


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("smollm", {}, [], []),
        ("qwen2", {}, [], []),
        ("llama-bpe", {}, [0], []),
        ("llama-bpe", {"ggml__add_bos_token": False}, [], []),
        ("smollm", {"ggml__add_bos_token": True, "ggml__add_eos_token": True}, [0], [1]),
    ],
)
def test_b003_flags_of_the_file_decide(
    pre: str, flags: dict[str, bool], before: list[int], after: list[int]
) -> None:
    """BOS and EOS ids are named in every file; only the flags (or the kind) add them."""
    files = tokenizer_files_from_gguf(byte_level_metadata(pre, **flags))
    tokenizer = Tokenizer(files)
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [*before, *hello, *after]
    assert tokenizer.encode("<s>hello") == [0, *hello, *after]


def test_token_types() -> None:
    """Control tokens are cut out and not shown, user-defined ones are cut out and shown."""
    tokens = [*byte_level_tokens(), "<call>", "hel"]
    types = [3, 3, 3] + [NORMAL_TYPE] * (len(tokens) - 5) + [USER_TYPE, 5]
    metadata = byte_level_metadata(ggml__tokens=tokens, ggml__token_type=types)
    tokenizer = Tokenizer(tokenizer_files_from_gguf(metadata))
    ids = tokenizer.encode("<call>hello<|user|>")
    assert ids == [len(tokens) - 2, tokens.index("hello"), 2]
    assert tokenizer.decode(ids) == "<call>hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<call>hello<|user|>"


def test_special_tokens_and_template(tmp_path: Path) -> None:
    metadata = byte_level_metadata(
        chat_template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", ggml__padding_token_id=2
    )
    files = tokenizer_files_from_gguf(metadata)
    tokenizer = Tokenizer(files)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    turns = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<s>|</s>|<|user|>"
    write_tokenizer_files(files, tmp_path)
    assert read_tokenizer_files(tmp_path) == files


@pytest.fixture
def sentencepiece() -> Tokenizer:
    return Tokenizer(tokenizer_files_from_gguf(sentencepiece_metadata(PIECES)))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a", [SPACE + "a"]),  # the dummy prefix joins first
        ("abc", [SPACE + "a", "bc"]),  # " a" (-1), then "bc" (-2), before "ab" (-3)
        ("ab", [SPACE + "ab"]),  # " a" (-1), then " ab" (-4) from " a" + "b"
        ("dab", [SPACE, "d", "ab"]),
        ("dabc", [SPACE, "d", "a", "bc"]),
        ("abcd", [SPACE + "a", "bc", "d"]),  # "abcd" has no two pieces left to join
        ("  a", [SPACE, SPACE, SPACE + "a"]),
        ("a b", [SPACE + "a", SPACE, "b"]),
        ("", []),
    ],
)
def test_sentencepiece_joins_the_best_score_first(
    sentencepiece: Tokenizer, text: str, pieces: list[str]
) -> None:
    """Worked out by hand from the scores."""
    names = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *(piece for piece, _ in PIECES)]
    assert sentencepiece.encode(text) == [1, *(names.index(piece) for piece in pieces)]
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_sentencepiece_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    """Byte b of an unknown character is token 3 + b."""
    prefix = 3 + 256
    assert sentencepiece.encode("é\n<") == [1, prefix, 3 + 0xC3, 3 + 0xA9, 3 + 0x0A, 3 + 0x3C]
    assert sentencepiece.decode(sentencepiece.encode("é\n\U0001fae0 a")) == "é\n\U0001fae0 a"


def test_sentencepiece_prefix_after_a_special_token(sentencepiece: Tokenizer) -> None:
    space_a = 3 + 256 + 5
    assert sentencepiece.encode("<s>a</s>a") == [1, space_a, 2, space_a]


def test_sentencepiece_without_the_dummy_prefix() -> None:
    metadata = sentencepiece_metadata(PIECES, ggml__add_space_prefix=False)
    tokenizer = Tokenizer(tokenizer_files_from_gguf(metadata))
    assert _pieces(tokenizer, "ab") == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({}, CheckpointError, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedError, "'bert'; supported are 'gpt2' with"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedError, "'t5'"),
        (byte_level_metadata("tekken"), UnsupportedError,
         "pre 'tekken'; supported .* llama-bpe, qwen2, smollm, and 'llama'"),
        (byte_level_metadata(None), UnsupportedError, "pre None"),
        (byte_level_metadata(ggml__model=3), CheckpointError, "model must be str, not int"),
        (byte_level_metadata(ggml__merges=None), CheckpointError, "merges is missing"),
        (byte_level_metadata(ggml__merges=["h q"]), CheckpointError, "merge 'h q'"),
        (byte_level_metadata(ggml__merges=["h e l"]), CheckpointError, "merge 'h e l'"),
        (byte_level_metadata(ggml__tokens=["a"]), CheckpointError, "265 entries for 1 tokens"),
        (byte_level_metadata(ggml__tokens=[1, 2]), CheckpointError, "tokens holds 1"),
        (byte_level_metadata(ggml__eos_token_id=10**6), CheckpointError,
         "eos_token_id is 1000000; the vocabulary has 265"),
        (byte_level_metadata("llama-bpe", ggml__bos_token_id=None), CheckpointError,
         "add_bos_token is set but tokenizer.ggml.bos_token_id is missing"),
        (sentencepiece_metadata(PIECES, ggml__scores=None), CheckpointError, "scores is missing"),
        (sentencepiece_metadata(PIECES, ggml__remove_extra_whitespaces=True), UnsupportedError,
         "remove_extra_whitespaces is set"),
    ],
)  # fmt: skip
def test_metadata_that_is_refused(
    metadata: dict[str, Any], error: type[SwiftJaxError], message: str
) -> None:
    with pytest.raises(error, match=message):
        tokenizer_files_from_gguf(metadata)


def test_user_defined_token_with_a_space_is_refused() -> None:
    metadata = sentencepiece_metadata([*PIECES, (SPACE * 4, 0.0)])
    metadata["tokenizer.ggml.token_type"][-1] = USER_TYPE
    with pytest.raises(UnsupportedError, match="user-defined token"):
        tokenizer_files_from_gguf(metadata)
