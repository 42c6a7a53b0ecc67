"""Text to ids and back: reference ids, where BOS goes, what is refused, the library as oracle."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import CheckpointError, InvalidRequestError, UnsupportedError
from swiftjax.tokenizer_files import TokenizerFiles
from tests.tiny_tokenizers import bos_processor, byte_level_files

R1_IDS = {
    "Hello world": [19556, 905],
    "\U0001fae0": [10813, 121, 250],
    "ď": [143, 233],
    "龜": [180, 139, 246],
    "12345": [33, 34, 35, 36, 37],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "1, 2, 3, 4, 5,": [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28],
}
CHAT_HEAD = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198,
]  # fmt: skip
CHAT_TAIL = [2, 198, 1, 520, 9531, 198]
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


@pytest.mark.demo_model
@pytest.mark.parametrize("text", R1_IDS)
def test_r1_ids(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.encode(text) == R1_IDS[text]
    assert smollm2.decode(R1_IDS[text]) == text


@pytest.mark.demo_model
def test_r1_offsets(smollm2: Tokenizer) -> None:
    encoding = smollm2.encode_with_offsets("The capital of France is")
    assert encoding.offsets == [(0, 3), (3, 11), (11, 14), (14, 21), (21, 24)]


@pytest.mark.demo_model
def test_r1_special_ids(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_id) == (49152, 1, 2)


@pytest.mark.demo_model
@pytest.mark.parametrize(
    ("text", "ids", "count"),
    [("Hi", [26843], 31), ("What is 2+2?", [1780, 314, 216, 34, 27, 34, 47], 37)],
)
def test_b003_smollm2_chat(smollm2: Tokenizer, text: str, ids: list[int], count: int) -> None:
    """The template writes every special token itself; nothing is added around it."""
    prompt = smollm2.apply_chat_template([{"role": "user", "content": text}])
    assert prompt == [*CHAT_HEAD, *ids, *CHAT_TAIL]
    assert len(prompt) == count
    assert prompt[0] != prompt[1]


@pytest.mark.demo_model
def test_b003_smollm2_completion(smollm2: Tokenizer) -> None:
    """add_bos is false in the file, although a BOS id is named."""
    assert smollm2.encode("Hello world") == [19556, 905]


def test_b003_one_bos() -> None:
    """A model that adds BOS and whose template writes it as well."""
    tokenizer = Tokenizer(
        byte_level_files(post_processor=bos_processor(), chat_template=BOS_TEMPLATE)
    )
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == [0, *hello]
    assert tokenizer.encode("hello") == [0, *hello]
    assert tokenizer.encode("<s>hello") == [0, *hello]


@given(text=TEXTS, count=st.integers(0, 3))
def test_b003_bos_is_never_doubled(bos_tokenizer: Tokenizer, text: str, count: int) -> None:
    """BOS written in the text n times gives n, and one where the text has none."""
    encoding = bos_tokenizer.encode_with_offsets("<s>" * count + text)
    plain = bos_tokenizer.encode("<s>" * count + text, add_special_tokens=False)
    starts_with_bos = plain[:1] == [0]
    assert encoding.ids == (plain if starts_with_bos else [0, *plain])
    assert len(encoding.offsets) == len(encoding.ids)


@pytest.fixture(scope="module")
def bos_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_files(post_processor=bos_processor()))


@pytest.mark.parametrize(
    ("config", "processor", "expected"),
    [
        ({}, None, ([], [])),
        ({}, bos_processor(), ([0], [])),
        ({}, bos_processor(eos=True), ([0], [1])),
        ({}, bos_processor(bos=False, eos=True), ([], [1])),
        ({"add_bos_token": False}, bos_processor(), ([0], [])),
        ({"add_bos_token": True, "add_eos_token": True}, None, ([], [])),
    ],
)
def test_where_bos_and_eos_go(
    config: dict[str, Any],
    processor: dict[str, Any] | None,
    expected: tuple[list[int], list[int]],
) -> None:
    """As transformers 5.24 does with these files: flags beside a tokenizer.json are ignored."""
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    tokenizer = Tokenizer(byte_level_files(config=named, post_processor=processor))
    hello = tokenizer.encode("hello", add_special_tokens=False)
    before, after = expected
    assert tokenizer.encode_with_offsets("hello") == (
        [*before, *hello, *after],
        [*[(0, 0)] * len(before), (0, 5), *[(5, 5)] * len(after)],
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\0b", "NUL character at position 1"),
        ("ab\ud800", "lone surrogate at position 2"),
        ("x" * 101, "101 characters; at most 100"),
    ],
)
def test_text_that_is_refused(text: str, message: str) -> None:
    tokenizer = Tokenizer(byte_level_files(chat_template=BOS_TEMPLATE), max_chars=100)
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.encode(text)
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.apply_chat_template([{"role": "user", "content": text}])


def test_training_settings_of_the_file_are_ignored() -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    files = byte_level_files(truncation=truncation, padding=padding)
    assert len(Tokenizer(files).encode("xyzxyz")) == 6


def test_special_tokens_named_only_in_the_config() -> None:
    tokenizer = Tokenizer(byte_level_files(added_tokens=[]))
    assert tokenizer.encode("</s>") == [1]
    assert tokenizer.decode([1, 0]) == ""


@given(ids=st.lists(st.integers(0, 300), max_size=30), skip=st.booleans())
def test_byte_level_decode_equals_the_library(
    byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    oracle = byte_level._backend
    assert byte_level.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


@given(text=TEXTS)
def test_sentencepiece_decode_equals_the_library(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert sentencepiece.decode(ids) == sentencepiece._backend.decode(ids)
    assert "<s>" in text or sentencepiece.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.demo_model
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_smollm2_decode_equals_the_library(smollm2: Tokenizer, ids: list[int]) -> None:
    assert smollm2.decode(ids) == smollm2._backend.decode(ids)


def test_decode_takes_any_integer(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello w")
    assert byte_level.decode(np.asarray(ids, np.int32)) == "hello w"
    assert byte_level.decode([*ids, 10**6]) == "hello w"
    with pytest.raises(InvalidRequestError, match="-1 is negative"):
        byte_level.decode([-1])


def test_threads_share_a_tokenizer(byte_level: Tokenizer) -> None:
    texts = [f"hello {i} ď\U0001fae0" * 20 for i in range(64)]
    expected = [byte_level.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(byte_level.encode, texts)) == expected
        assert list(pool.map(byte_level.decode, expected)) == texts


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"model": {"type": "Nope"}}, CheckpointError, "tokenizer.json cannot be used"),
        ({"decoder": None}, UnsupportedError, "decoder None is not supported"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, UnsupportedError,
         "WordPiece.*known are ByteLevel"),
        ({"decoder": {"type": "Sequence", "decoders": [
            {"type": "Fuse"}, {"type": "Strip", "content": "x", "start": 1, "stop": 0}]}},
         UnsupportedError, "not supported"),
    ],
)  # fmt: skip
def test_files_that_are_refused(
    overrides: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Tokenizer(byte_level_files(**overrides))


def test_an_empty_vocabulary_is_refused() -> None:
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    with pytest.raises(CheckpointError, match="empty vocabulary"):
        Tokenizer(TokenizerFiles(tokenizer_json=json.dumps(empty), config={}))
