"""The HTTP parts of the published cases on real weights, through the unmodified openai package."""

import json
from collections.abc import Iterator

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serving.http.harness import DEMO_MODEL as MODEL
from tests.serving.http.harness import KEY

pytestmark = pytest.mark.demo_model

FRANCE = "The capital of France is"
COUNT = "1, 2, 3, 4, 5,"
HI = [{"role": "user", "content": "Hi"}]
# -11.5393 and so on are of the prompt, the last one is of " Paris".
SCORES = [-11.5393, -0.3376, -2.4387, -0.4509, -0.2581]


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: object, **fields: object) -> Completion:
    """A greedy completion."""
    options = {"temperature": 0, "max_tokens": 16} | fields
    answer = client.completions.create(model=MODEL, prompt=prompt, **options)  # type: ignore[call-overload]
    if not fields.get("echo"):  # OpenAI's server has null for the first token, its types do not
        Completion.model_validate(answer.model_dump())
    return answer


def test_b003_b051_chat_of_the_reference_prompt(client: openai.OpenAI) -> None:
    """31 ids and one BOS; greedy text; usage; a valid object of theirs."""
    answer = client.chat.completions.create(model=MODEL, messages=HI, temperature=0)  # type: ignore[arg-type]
    ChatCompletion.model_validate(answer.model_dump())
    assert answer.choices[0].message.content == "Hello! How can I assist you today?"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (31, 10)


def test_b003_raw_prompt_gets_no_bos(client: openai.OpenAI) -> None:
    body = {"prompt": "Hello world"}
    answer = client.post("/../tokenize", body=body, cast_to=object)
    assert answer["tokens"] == [19556, 905]  # type: ignore[index]


def test_b051_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HI,  # type: ignore[arg-type]
        n=2,
        max_tokens=3,
        temperature=0,  # other settings would be compiled too
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": 31,
        "completion_tokens": 6,
    }
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": [", 8"]}, " 6, 7"),
        ({"stop": ["7, 8"]}, " 6, "),
        ({"stop": ", 8", "extra_body": {"include_stop_str_in_output": True}}, " 6, 7, 8"),
        ({"stop": []}, " 6, 7, 8, 9, 10,"),
    ],
)
def test_b006_stop_string_over_a_token_boundary(
    client: openai.OpenAI, fields: dict[str, object], text: str, stream: bool
) -> None:
    answer = complete(client, COUNT, stream=stream, **fields) if not stream else None
    if answer is not None:
        assert answer.choices[0].text == text
        reason = answer.choices[0].finish_reason
    else:
        options = {"temperature": 0, "max_tokens": 16} | fields
        chunks = list(
            client.completions.create(model=MODEL, prompt=COUNT, stream=True, **options)  # type: ignore[call-overload]
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        reason = chunks[-1].choices[0].finish_reason
    assert reason == ("stop" if fields["stop"] else "length")


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_b006_empty_stop_string_is_400(client: openai.OpenAI, stop: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, COUNT, stop=stop)
    assert caught.value.param == "stop"


def test_b019_bias_bans_a_token(client: openai.OpenAI) -> None:
    answer = complete(client, FRANCE, max_tokens=1, logit_bias={"7042": -100})
    assert answer.choices[0].text == " the"


def test_b016_most_likely_tokens(client: openai.OpenAI) -> None:
    answer = complete(client, FRANCE, max_tokens=1, logprobs=2)
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.top_logprobs is not None
    expected = {" Paris": -0.2581, " the": -2.7408}
    assert scores.top_logprobs[0] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", [FRANCE, [504, 3575, 282, 4649, 314]], ids=["text", "ids"])
def test_b054_echoed_scores_stand_at_their_tokens(
    client: openai.OpenAI, prompt: object, max_tokens: int, stream: bool
) -> None:
    options = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    if stream:
        chunks = list(
            client.completions.create(
                model=MODEL,
                prompt=prompt,
                temperature=0,
                stream=True,
                **options,  # type: ignore[call-overload]
            )
        )
        text = "".join(chunk.choices[0].text for chunk in chunks)
        parts = [c.choices[0].logprobs.model_dump() for c in chunks if c.choices[0].logprobs]
        scores = {name: [x for p in parts for x in p[name]] for name in parts[0]}
    else:
        choice = complete(client, prompt, **options).choices[0]
        assert choice.logprobs is not None
        text, scores = choice.text, choice.logprobs.model_dump()
    count = 5 + max_tokens
    assert text == FRANCE + (" Paris" if max_tokens else "")
    assert "".join(scores["tokens"]) == text and len(scores["tokens"]) == count
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == pytest.approx(SCORES[: count - 1], abs=0.01)
    assert scores["text_offset"] == [0, 3, 11, 14, 21, 24][:count]


def test_errors_are_those_of_openai(client: openai.OpenAI, address: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="")
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong-key", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "swiftjax"


def test_chat_scores_are_those_of_openai(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HI,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=2,
        logprobs=True,
        top_logprobs=3,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None and [entry.token for entry in content] == ["Hello", "!"]
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob


def test_b001_constrained_character_of_several_tokens_is_streamed_whole(
    client: openai.OpenAI,
) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HI,  # type: ignore[arg-type]
        temperature=0,
        stream=True,
        extra_body={"structured_outputs": {"json": {"enum": ["\U0001fae0"]}}},
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(texts) == '"\U0001fae0"'
    assert all("\ufffd" not in text for text in texts)


def test_p16_answer_of_a_real_model_fits_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    question = "Describe Paris as JSON with the keys city and big."
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": schema, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content or "")
    assert value.keys() == {"city", "big"} and isinstance(value["big"], bool)
