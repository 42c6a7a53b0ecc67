"""Tools over HTTP: offered to the template, called by what the model writes, answered back."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from swiftjax.batch import Batch
from swiftjax.engine.core import EngineCore
from swiftjax.engine.request import Request
from tests.engine.test_grammar import make_core as make_random_core
from tests.fakes import FakeRunner, make_fake_core
from tests.serving.harness import END_ID, VOCAB_SIZE, byte_tokenizer
from tests.serving.http.harness import HttpService, Json, serving

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
SCHEMA |= {"required": ["city"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time"}}
TOOLS = [WEATHER, CLOCK]
TEMPLATE = (
    "{% if tools %}<tool_call>:{{ tools | tojson }};{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %};{% endfor %}"
)
LLAMA = TEMPLATE.replace("<tool_call>", '{"name": x, "parameters": y}')
LISTS = {"name": "a", "parameters": {"type": "array"}}
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock"}\n</tool_call>'
)


class ScriptedRunner(FakeRunner):
    """Writes a text, whatever it is asked; one request at a time."""

    def __init__(self, text: str) -> None:
        super().__init__(VOCAB_SIZE)
        self._rest = iter([*text.encode(), END_ID])

    def _sample(self, batch: Batch, token_ids: np.ndarray) -> list[int]:
        return [next(self._rest) for _ in batch.sample_rows if _ < len(token_ids)]


def scripted(text: str) -> EngineCore:
    """A core whose model writes this text."""
    return make_fake_core(
        vocab_size=VOCAB_SIZE, eos_token_ids=(END_ID,), runner=ScriptedRunner(text),
        num_pages=2048, max_model_len=4096, max_num_batched_tokens=4096, max_num_seqs=1,
    )  # fmt: skip


def run(
    core: EngineCore,
    body: Callable[[HttpService], Awaitable[None]],
    template: str = TEMPLATE,
) -> None:
    """Run a test against a server whose chat template knows tools."""

    async def main() -> None:
        async with serving(core) as service:
            service.engine.tokenizer = byte_tokenizer(template)
            await body(service)

    asyncio.run(main())


def names_and_arguments(message: Json) -> list[tuple[str, Any]]:
    """What a message calls; every call has an id of its own."""
    calls = message["tool_calls"]
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def test_calls_of_a_whole_answer() -> None:
    async def body(service: HttpService) -> None:
        answer = await service.post(PATH, {"messages": HI, "tools": TOOLS})
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["swiftjax_finish_reason"] == "stop"
        assert choice["message"]["content"] == "Let me see."
        expected = [("weather", {"city": "Rome"}), ("clock", {})]
        assert names_and_arguments(choice["message"]) == expected

    run(scripted(f"Let me see.\n{CALLS}"), body)


def test_calls_of_a_stream() -> None:
    async def body(service: HttpService) -> None:
        chunks = await service.events(PATH, {"messages": HI, "tools": TOOLS, "logprobs": True})
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[-1]["finish_reason"] == "tool_calls" and choices[-1]["delta"] == {}
        assert "".join(c["delta"].get("content", "") for c in choices) == ""
        pieces = [call for c in choices for call in c["delta"].get("tool_calls", ())]
        for index, name, arguments in ((0, "weather", '{"city": "Rome"}'), (1, "clock", "{}")):
            mine = [piece for piece in pieces if piece["index"] == index]
            assert mine[0]["function"]["name"] == name and mine[0]["id"].startswith("call_")
            assert all(set(piece) == {"index", "function"} for piece in mine[1:])
            assert "".join(piece["function"]["arguments"] for piece in mine) == arguments
        scored = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        assert bytes(b for entry in scored for b in entry["bytes"]).decode() == CALLS

    run(scripted(CALLS), body)


def test_text_is_text_though_there_are_tools() -> None:
    async def body(service: HttpService) -> None:
        answer = await service.post(PATH, {"messages": HI, "tools": TOOLS})
        assert answer["choices"][0]["message"]["content"] == "No <tools> needed. "
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "tool_calls" not in answer["choices"][0]["message"]

    run(scripted("No <tools> needed. "), body)


def test_without_parallel_calls_there_is_one() -> None:
    async def body(service: HttpService) -> None:
        request = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
        answer = await service.post(PATH, request)
        [call] = names_and_arguments(answer["choices"][0]["message"])
        assert call == ("weather", {"city": "Rome"})
        assert answer["choices"][0]["message"]["content"] is None

    run(scripted(CALLS), body)


def test_call_that_is_cut_ends_by_its_length() -> None:
    async def body(service: HttpService) -> None:
        answer = await service.post(PATH, {"messages": HI, "tools": TOOLS, "max_tokens": 55})
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length"
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "'}

    run(scripted(CALLS), body)


@pytest.mark.parametrize("template", [TEMPLATE, LLAMA], ids=["hermes", "llama3_json"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
)
def test_demanded_calls_of_a_random_model(choice: object, names: set[str], template: str) -> None:
    """Whatever its weights say, it calls one of the tools, with arguments of the schema."""

    async def body(service: HttpService) -> None:
        request = {"messages": HI, "tools": TOOLS, "tool_choice": choice, "n": 4, "seed": 1}
        request |= {"max_tokens": 300, "parallel_tool_calls": False}
        answer = await service.post(PATH, request)
        for made in answer["choices"]:
            assert made["finish_reason"] == "tool_calls" and made["message"]["content"] is None
            [(name, arguments)] = names_and_arguments(made["message"])
            assert name in names
            assert arguments in (
                [{"city": "Paris"}, {"city": "Rome"}] if name == "weather" else [{}]
            )

    run(make_random_core(), body, template)


def test_what_the_model_is_told() -> None:
    """Tools and earlier calls in the template's words; nothing of tools with tool_choice none."""

    async def body(service: HttpService) -> None:
        seen: list[Request] = []
        submit = service.engine._link.submit
        service.engine._link.submit = lambda r: (seen.append(r), submit(r))[1]  # type: ignore[method-assign]
        call = {"id": "call_1", "type": "function"}
        call |= {"function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
        turns = [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        strict = {"type": "function", "function": CLOCK["function"] | {"strict": False}}
        request = {"messages": turns, "tools": [WEATHER, strict], "max_tokens": 1}
        await service.post(PATH, request)
        await service.post(PATH, request | {"tool_choice": "none"})
        with_tools, without = (bytes(r.prompt_token_ids).decode() for r in seen)
        history = (
            'user:Hi;assistant:[{"type": "function", "function": {"name": "weather", "arguments": '
            '{"city": "Rome"}}, "id": "call_1"}];tool:sunny(call_1);'
        )
        assert without == history
        assert with_tools == f"<tool_call>:{json.dumps(TOOLS)};{history}"
        counted = await service.post("/tokenize", {"messages": turns, "tools": TOOLS})
        assert counted["count"] == len(with_tools.encode())

    run(scripted("ab" * 9), body)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice", "not in tools",
        ),
        ({"tools": [CLOCK, CLOCK]}, "tools", "clock twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "tools"),
        ({"tools": [CLOCK] * 129}, "tools", "128"),
        (
            {"tools": [{"type": "function", "function": LISTS}]},
            "tools", "type object",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format", "calls of tools",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, None, "ignore_eos"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "strict": True,
                "parameters": {"properties": {"x": {"pattern": "("}}}}}],
            },
            None, "tool_calls cannot be used",
        ),
        ({"functions": [{"name": "a"}]}, "functions", "not supported"),
    ],
)  # fmt: skip
def test_mistakes(fields: Json, param: str | None, message: str) -> None:
    async def body(service: HttpService) -> None:
        error = await service.refused(PATH, {"messages": HI} | fields)
        assert message in error["message"] and error["param"] == param
        assert service.num_steps == 0

    run(scripted(""), body)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ messages[0].content }}", "--chat-template"), ("{{ tools }}", "--tool-call-parser")],
)
def test_templates_without_tools_say_so(template: str, message: str) -> None:
    async def body(service: HttpService) -> None:
        error = await service.refused(PATH, {"messages": HI, "tools": TOOLS})
        assert message in error["message"]
        await service.post(PATH, {"messages": HI, "tools": TOOLS, "tool_choice": "none"})

    run(scripted("x"), body, template)


@pytest.mark.parametrize("depth", [40, 400, 900, 5000])
def test_schemas_of_any_depth_are_answered(depth: int) -> None:
    """Whether or not it can be held to."""
    nested = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
    tool = f'{{"type": "function", "function": {{"name": "a", "parameters": {nested}}}}}'

    async def body(service: HttpService) -> None:
        for choice in ("auto", "required"):
            request = f'{{"messages": [{json.dumps(HI[0])}], "tools": [{tool}], "max_tokens": 1'
            content = f'{request}, "tool_choice": "{choice}"}}'
            headers = {"content-type": "application/json"}
            answer = await service.client.post(PATH, content=content, headers=headers)
            assert answer.status_code in (200, 400), answer.text

    run(make_random_core(), body)
