"""Tools on real weights, through the unmodified openai package."""

import json
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serving.http.conftest import Addresses
from tests.serving.http.harness import DEMO_MODEL, KEY

pytestmark = pytest.mark.demo_model

CITIES = ["Paris", "Rome"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
QUESTION = {"role": "user", "content": "How is the weather in Rome?"}
ASKED = {
    "model": DEMO_MODEL,
    "messages": [QUESTION],
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "temperature": 0,
}


@pytest.fixture(scope="module")
def client(addresses: Addresses) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the port whose template knows tools."""
    base = f"{addresses.with_tools}/v1"
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_call_is_made_and_answered(client: openai.OpenAI) -> None:
    """Whole and streamed the same; the answer of the tool goes back as the package sends it."""
    answer = client.chat.completions.create(**ASKED)  # type: ignore[call-overload]
    ChatCompletion.model_validate(answer.model_dump())
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in CITIES
    with client.chat.completions.stream(
        **{name: value for name, value in ASKED.items() if name != "stream"}  # type: ignore[arg-type]
    ) as stream:
        for event in stream:
            if event.type == "chunk":
                ChatCompletionChunk.model_validate(event.chunk.model_dump())
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    final = client.chat.completions.create(
        model=DEMO_MODEL,
        messages=[QUESTION, message, result],  # type: ignore[list-item]
        tools=[WEATHER],  # type: ignore[list-item]
        temperature=0,
        max_tokens=5,
    )
    assert final.choices[0].message.content


def test_the_models_own_template_refuses_tools(address: str) -> None:
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="--chat-template"),
    ):
        client.chat.completions.create(**ASKED)  # type: ignore[call-overload]
