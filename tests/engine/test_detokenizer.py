"""Streams of text: whole characters, deltas that join up, stop strings that never show."""

from collections.abc import Sequence
from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftjax.engine.detokenizer import Detokenizer, StopStrings, TextDelta, TextStream
from swiftjax.engine.request import FinishReason, GenerationConfig
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import InvalidRequestError

# ' 6, 7, 8, 9, 10,' in reference facts R1
COUNTING = [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28]
CHUNKINGS = st.lists(st.integers(1, 4), max_size=30)


def _chunks(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """Cut ids into chunks of the given sizes; what is left comes one at a time."""
    chunks, start = [], 0
    for size in (*sizes, *[1] * len(ids)):
        chunks.append(ids[start : start + size])
        start += size
    return [chunk for chunk in chunks if chunk]


class Letters:
    """A tokenizer whose token i writes the character i; counts how often it is asked."""

    leading_spaces = 0

    def __init__(self) -> None:
        self.num_asked = 0

    def token_bytes(self, token_id: SupportsIndex, skip_special_tokens: bool = True) -> bytes:
        """The character itself."""
        self.num_asked += 1
        return chr(token_id.__index__()).encode()


@pytest.mark.demo_model
@pytest.mark.parametrize(
    ("ids", "deltas"),
    [
        ([10813, 121, 250], ["", "", "\U0001fae0"]),
        ([143, 233], ["", "ď"]),
        ([180, 139, 246], ["", "", "龜"]),
    ],
)
def test_b001_character_over_several_tokens(
    smollm2: Tokenizer, ids: list[int], deltas: list[str]
) -> None:
    """One id at a time gives nothing until the character is whole."""
    detokenizer = Detokenizer(smollm2)
    assert [detokenizer.push([i]) for i in ids] == deltas
    assert detokenizer.finish() == ""
    assert "".join(deltas) == smollm2.decode(ids)


@pytest.mark.demo_model
def test_b001_generation_ends_inside_a_character(smollm2: Tokenizer) -> None:
    """One flush of replacement text at the finish."""
    stream = TextStream(smollm2, GenerationConfig())
    assert stream.push([10813], None) == TextDelta("")
    assert stream.push([121], "length") == TextDelta("\ufffd", "length")
    assert smollm2.decode([10813, 121]) == "\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(data=st.data())
def test_b001_deltas_join_to_the_decoding(
    kind: str, byte_level: Tokenizer, sentencepiece: Tokenizer, data: st.DataObject
) -> None:
    """Any ids (special and unknown ones too), any chunking, both kinds of tokenizer."""
    tokenizer = {"byte_level": byte_level, "sentencepiece": sentencepiece}[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    deltas = [detokenizer.push(chunk) for chunk in _chunks(ids, data.draw(CHUNKINGS))]
    assert "".join([*deltas, detokenizer.finish()]) == tokenizer.decode(ids, skip)


@pytest.mark.demo_model
@given(ids=st.lists(st.integers(0, 49151), max_size=30), sizes=CHUNKINGS)
def test_b001_deltas_join_to_the_decoding_smollm2(
    smollm2: Tokenizer, ids: list[int], sizes: list[int]
) -> None:
    detokenizer = Detokenizer(smollm2)
    deltas = [detokenizer.push(chunk) for chunk in _chunks(ids, sizes)]
    assert "".join([*deltas, detokenizer.finish()]) == smollm2.decode(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), sizes=CHUNKINGS)
def test_b001_valid_text_never_shows_a_replacement(
    sentencepiece: Tokenizer, text: str, sizes: list[int]
) -> None:
    text = text.replace("\0", "").replace("\ufffd", "")
    detokenizer = Detokenizer(sentencepiece)
    for chunk in _chunks(sentencepiece.encode(text), sizes):
        assert "\ufffd" not in detokenizer.push(chunk)
    assert detokenizer.finish() == ""


def test_sentencepiece_drops_one_leading_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("  ab")
    detokenizer = Detokenizer(sentencepiece)
    assert "".join(detokenizer.push([i]) for i in ids) == "  ab"


def test_every_token_is_looked_at_once() -> None:
    letters = Letters()
    stream = TextStream(letters, GenerationConfig(stop=["never", "aaab"]))
    for _ in range(1000):
        stream.push([ord("a")], None)
    assert letters.num_asked == 1000


def _run(
    tokenizer: Tokenizer,
    config: GenerationConfig,
    chunks: Sequence[Sequence[int]],
    reason: FinishReason = "length",
) -> tuple[list[str], TextDelta]:
    """Texts of all deltas and the delta that ended the stream."""
    stream, texts = TextStream(tokenizer, config), []
    for index, chunk in enumerate(chunks):
        delta = stream.push(chunk, reason if index == len(chunks) - 1 else None)
        texts.append(delta.text)
        if delta.finish_reason is not None:
            return texts, delta
    raise AssertionError("the stream did not end")


@pytest.mark.demo_model
@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [
        (", 8", False, " 6, 7"),
        ("7, 8", False, " 6, "),
        (", 8", True, " 6, 7, 8"),
        ("7, 8", True, " 6, 7, 8"),
    ],
)
def test_b006_stop_string_over_a_token_edge(
    smollm2: Tokenizer, stop: str, include: bool, text: str, size: int
) -> None:
    """The text is cut exactly, whatever the chunking, and the reason is stop."""
    config = GenerationConfig(stop=[stop], include_stop_str=include)
    chunks = [COUNTING[i : i + size] for i in range(0, len(COUNTING), size)]
    texts, last = _run(smollm2, config, chunks)
    assert "".join(texts) == text
    assert last[1:] == ("stop", stop)


@pytest.mark.demo_model
def test_b006_text_without_a_stop_head_is_shown_at_once(smollm2: Tokenizer) -> None:
    texts, last = _run(smollm2, GenerationConfig(stop=["\n\n"]), [[i] for i in COUNTING])
    assert texts == [smollm2.decode([i]) for i in COUNTING]
    assert last[1:] == ("length", None)


def test_b006_empty_stop_is_refused() -> None:
    """It would be found before the first character."""
    with pytest.raises(InvalidRequestError, match="non-empty"):
        GenerationConfig(stop=[""])


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first (the longest of several)."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths), end
    return None


@given(text=st.text("ab c", max_size=24), stops=STOPS, sizes=CHUNKINGS, include=st.booleans())
def test_b006_any_stops_any_chunking(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    """Against a search of the whole text; nothing is held back that cannot start a stop."""
    found = _first_stop(text, stops)
    expected = text if found is None else text[: found[include]]
    scanner, shown, taken = StopStrings(stops, include=include), "", ""
    for chunk in _chunks(text, sizes):  # type: ignore[arg-type]
        scan = scanner.push(str(chunk))
        shown, taken = shown + scan.text, taken + str(chunk)
        assert expected.startswith(shown)
        if scan.matched is not None:
            assert found is not None and text[found[0] : found[1]] == scan.matched
            break
        heads = [size for stop in stops for size in range(len(stop)) if taken.endswith(stop[:size])]
        assert len(taken) - len(shown) == max(heads, default=0)
    else:
        assert found is None
        shown += scanner.finish()
    assert shown == expected


def test_two_stops_complete_at_once() -> None:
    assert StopStrings(["b", "ab"]).push("xab") == ("x", "ab")
    assert StopStrings(["abc", "b"]).push("xabc") == ("xa", "b")


@pytest.mark.demo_model
def test_b008_text_of_the_stop_token_is_not_shown(smollm2: Tokenizer) -> None:
    """' Paris' then id 30 ('.', a stop id here): the period is a token but not text."""
    texts, last = _run(smollm2, GenerationConfig(), [[7042], [30]], "stop")
    assert texts == [" Paris", ""]
    assert last == TextDelta("", "stop", 30)


@pytest.mark.demo_model
def test_b008_ignored_eos_is_still_not_shown(smollm2: Tokenizer) -> None:
    texts, last = _run(smollm2, GenerationConfig(ignore_eos=True), [[7042, 2, 30]])
    assert texts == [" Paris."]
    assert last.finish_reason == "length"


def test_a_stop_token_releases_held_text(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, GenerationConfig(stop=["hello!"]))
    assert stream.push(byte_level.encode("hello"), None) == TextDelta("")
    assert stream.push([1], "stop") == TextDelta("hello", "stop", 1)


@pytest.mark.parametrize("reason", ["length", "abort", "time_limit", "error"])
def test_every_end_releases_held_text(byte_level: Tokenizer, reason: FinishReason) -> None:
    stream = TextStream(byte_level, GenerationConfig(stop=["hello!"]))
    assert stream.push(byte_level.encode("hello"), None) == TextDelta("")
    assert stream.push([], reason) == TextDelta("hello", reason)


def test_a_stop_string_beats_the_reason_given(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, GenerationConfig(stop=["o"]))
    assert stream.push(byte_level.encode("hello"), "length") == TextDelta("hell", "stop", "o")
    stream = TextStream(byte_level, GenerationConfig(stop=["o"]))
    ids = [*byte_level.encode("hello"), 1]
    assert stream.push(ids, "stop") == TextDelta("hell", "stop", "o")


def test_a_finished_stream_ignores_more(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, GenerationConfig(stop=["o"]))
    assert stream.push(byte_level.encode("hello"), None) == TextDelta("hell", "stop", "o")
    assert stream.push(byte_level.encode("hello"), None) == TextDelta("")
    assert stream.push([], "abort") == TextDelta("")
