"""Events whose surroundings were written once are those that are written whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftjax.engine.request import FinishReason, GenerationConfig, StreamOutput
from swiftjax.serving.http.events import EventWriter, event
from swiftjax.serving.http.writing import AnswerWriter, ChatWriter, CompletionWriter
from tests.serving.harness import byte_tokenizer

TOKENIZER = byte_tokenizer()
MODEL = 'a "model" \\u0000 of \u2028 many parts'


def output(text: str, index: int = 0, reason: FinishReason | None = None) -> StreamOutput:
    return StreamOutput(
        request_id="x",
        text=text,
        token_ids=(97,),
        logprobs=(-0.5,),
        finish_reason=reason,
        num_prompt_tokens=1,
        num_output_tokens=1,
        index=index,
    )


def make(kind: str, config: GenerationConfig) -> AnswerWriter:
    writer: AnswerWriter = CompletionWriter("id", MODEL, TOKENIZER, config, ["a"], [[97]])
    if kind == "chat":
        writer = ChatWriter("id", MODEL, TOKENIZER, config)
    writer._head["created"] = 0  # the second may end between two of them
    return writer


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("logprobs", [None, 1])
@given(texts=st.lists(st.tuples(st.text(max_size=5), st.integers(0, 1)), max_size=12))
@settings(max_examples=30, deadline=None)
def test_events_are_those_of_whole_chunks(
    kind: str, logprobs: int | None, texts: list[tuple[str, int]]
) -> None:
    config = GenerationConfig(n=2, logprobs=logprobs, temperature=1.0)
    quick, whole = EventWriter(make(kind, config)), make(kind, config)
    ends = [output("end", index, "length") for index in (0, 1)]
    for one in [*(output(text, index) for text, index in texts), *ends]:
        index = whole.count(0, one)
        assert quick.write(0, one) == b"".join(map(event, whole.chunks(index, one)))
    assert quick.usage() == event(whole.usage_chunk())


def test_a_text_stays_as_it_is() -> None:
    writer = EventWriter(make("completion", GenerationConfig()))
    for text in ('"', "\\", "\0", '"\0"', "\u2028", "☃", "a\n\nb"):
        data = writer.write(0, output(text)).removeprefix(b"data: ")
        assert data.count(b"\n\n") == 1 and json.loads(data)["choices"][0]["text"] == text
