"""Reading tool calls as they come, and the grammars that hold answers to them."""

import json
import random
from typing import Any

import numpy as np
import pytest

from swiftjax.engine.constraint import Constraint
from swiftjax.errors import InvalidRequestError
from swiftjax.serving.tools.calls import CallReader
from swiftjax.serving.tools.formats import (
    HERMES,
    LLAMA3_JSON,
    Tool,
    ToolFormat,
    constrain,
    find_format,
)
from tests.engine.test_grammar import COMPILER, answer_all, fits, make_core, random_schema
from tests.serving.harness import END_ID

NAMES = frozenset(("get", "put"))
GET = '{"name": "get", "arguments": {"a": [1, "}{\\" é"]}}'
PUT = '{"arguments":{ } , "name" : "put"}'
LLAMA = '{"name": "get", "parameters": {"a": 1}}'
Calls = list[tuple[str, str]]


def read(
    style: ToolFormat, texts: list[str], max_calls: int | None = None
) -> tuple[str, Calls, int]:
    """The contents, the calls with their whole arguments, and how many deltas told them."""
    reader = CallReader(style, NAMES, max_calls)
    content, calls, count = "", [], 0
    for index, text in enumerate(texts):
        told = reader.push(text, is_last=index == len(texts) - 1)
        content += told.content
        count += len(told.calls)
        for call in told.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, call.arguments))
            else:
                calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    assert reader.num_calls == len(calls) or texts[-1:] != [""]
    return content, calls, count


def tag(call: str) -> str:
    """A call as Hermes writes it."""
    return f"<tool_call>\n{call}\n</tool_call>"


ARGUMENTS = '{"a": [1, "}{\\" é"]}'
ANSWERS: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, "Just text. <tool", "Just text. <tool", []),
    (HERMES, "  two\n", "  two\n", []),
    (HERMES, tag(GET), "", [("get", ARGUMENTS)]),
    (HERMES, f"\n\n{tag(GET)}\n", "", [("get", ARGUMENTS)]),
    (
        HERMES, f"Let me see.\n{tag(GET)}\n{tag(PUT)} done", "Let me see. done",
        [("get", ARGUMENTS), ("put", "{ }")],
    ),
    (
        HERMES, f"<tool_call>{GET}</tool_call><tool_call>{PUT}", "",
        [("get", ARGUMENTS), ("put", "{ }")],
    ),
    (HERMES, tag('{"name": "get"}'), "", [("get", "{}")]),
    (HERMES, tag('{"id": {"name": 1}, "name": "get", "x": "}"}'), "", [("get", "{}")]),
    (HERMES, tag('{"name": "steal", "arguments": {}}'), None, []),
    (HERMES, tag('{"name": 5, "arguments": {}}'), None, []),
    (HERMES, tag('{"name": "get", "arguments": "x"}'), None, []),
    (HERMES, tag("[]"), None, []),
    (HERMES, tag("text"), None, []),
    (HERMES, "<tool_call>", None, []),
    (HERMES, '<tool_call>{"na', None, []),
    (HERMES, '<tool_call>{"name": "get", "arguments": {"a"', "", [("get", '{"a"')]),
    (HERMES, "a </tool_call> b", None, []),
    (HERMES, f"{tag(GET)}a </tool_call> b", "a </tool_call> b", [("get", ARGUMENTS)]),
    (HERMES, LLAMA, None, []),
    (LLAMA3_JSON, LLAMA, "", [("get", '{"a": 1}')]),
    (LLAMA3_JSON, f" \n<|python_tag|>{LLAMA}; {LLAMA}\n", "", [("get", '{"a": 1}')] * 2),
    (LLAMA3_JSON, f"Text {LLAMA}", None, []),
    (LLAMA3_JSON, f"{LLAMA} text", " text", [("get", '{"a": 1}')]),
    (LLAMA3_JSON, '{"answer": {"name": "get"}}', None, []),
    (LLAMA3_JSON, '{"name": "Ann", "age": 3}', None, []),
    (LLAMA3_JSON, "<|python", None, []),
    (LLAMA3_JSON, "{", None, []),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "content", "calls"), ANSWERS)
def test_any_chunking_reads_the_same(
    style: ToolFormat, text: str, content: str | None, calls: Calls
) -> None:
    """Content None stands for the text as it is."""
    expected = (text if content is None else content, calls)
    assert read(style, [text])[:2] == expected
    assert read(style, list(text))[:2] == expected
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(style, parts)[:2] == expected


def test_arguments_are_told_as_they_come() -> None:
    text = tag('{"name": "get", "arguments": {"text": "' + "x" * 50 + '"}}')
    assert read(HERMES, list(text))[2] > 50
    assert read(HERMES, ["Long text without a call"])[0] == "Long text without a call"
    reader = CallReader(HERMES, NAMES, None)
    assert reader.push("Hello < you").content == "Hello < you"
    assert reader.push(" <").content == "" and reader.push("b").content == " <b"


def test_a_single_call_is_all_that_is_told() -> None:
    assert read(HERMES, [tag(GET) + tag(PUT) + "text"], 1)[:2] == ("", [("get", ARGUMENTS)])
    assert read(LLAMA3_JSON, [f"{LLAMA}; {LLAMA}"], 1)[1] == [("get", '{"a": 1}')]


def test_formats_are_known_by_the_template() -> None:
    assert find_format("... <tool_call> ...", None) is HERMES
    assert find_format('{"name": "x", "parameters": {}}', None) is LLAMA3_JSON
    assert find_format("<tool_call>", "llama3_json") is LLAMA3_JSON
    for template in ("{{ tools }}", '[TOOL_CALLS] "name" "parameters"'):
        with pytest.raises(InvalidRequestError, match=r"parser \(hermes or llama3_json\)"):
            find_format(template, None)


def schema_of(rng: random.Random) -> dict[str, Any]:
    """A random schema of arguments."""
    names = ["a", "b"]
    return {
        "type": "object",
        "properties": {name: random_schema(rng, 1) for name in names},
        "required": names,
        "additionalProperties": False,
    }


@pytest.mark.parametrize("style", [HERMES, LLAMA3_JSON], ids=lambda style: style.name)
@pytest.mark.parametrize("only_one", [False, True])
def test_demanded_calls_of_a_random_model_fit_their_schemas(
    style: ToolFormat, only_one: bool
) -> None:
    rng = random.Random(5)
    offers, constraints = [], []
    for _ in range(20):
        schemas = {name: schema_of(rng) for name in sorted(NAMES)}
        tools = [Tool(name=name, schema=schema) for name, schema in schemas.items()]
        constraint = constrain(style, tools, "required", only_one=only_one)
        assert constraint is not None
        offers.append(schemas)
        constraints.append(constraint)
    num_whole = 0
    answers = answer_all(make_core(max_num_seqs=20, max_queue_len=20), constraints)
    for schemas, (text, reason) in zip(offers, answers, strict=True):
        content, calls, _ = read(style, [text])
        if reason == "length":
            continue
        num_whole += 1
        assert content == "" and calls and (len(calls) == 1 or not only_one)
        for name, arguments in calls:
            assert fits(json.loads(arguments), schemas[name]), text
    assert num_whole > 10


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether an answer may be this text and end there."""
    state = COMPILER.compile(constraint).start(0)
    words = np.zeros(state.num_words, np.int32)
    ids = list(text.encode())
    for count, token_id in enumerate([*ids, END_ID]):
        state.fill(ids[:count], words)
        if not np.unpackbits(words.view(np.uint8), bitorder="little")[token_id]:
            return False
    return True


def test_strict_tools_hold_calls_that_are_not_demanded() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [Tool(name="get", schema=schema, strict=True), Tool(name="put", schema={})]
    right, wrong = '{"a": 1}', '{"a": "x"}'
    for style, text in ((HERMES, tag), (LLAMA3_JSON, lambda call: call)):
        for only_one in (False, True):
            constraint = constrain(style, tools, "auto", only_one=only_one)
            assert constraint is not None
            call = f'{{"name": "get", "{style.arguments_key}": %s}}'
            assert accepts(constraint, "Any text, <b>tags</b> and {braces}.")
            assert accepts(constraint, text(call % right))
            assert not accepts(constraint, text(call % wrong))
            assert accepts(constraint, text(call.replace("get", "put") % wrong))
            assert not accepts(constraint, text(call.replace("get", "steal") % right))
            two = style.separator.join((text(call % right), text(call % right)))
            assert accepts(constraint, two) is not only_one
    lax = [Tool(name="put", schema={})]
    assert constrain(HERMES, lax, "auto", only_one=True) is None


def test_lenient_unless_strict() -> None:
    """What a schema asks beyond what can be held to is refused where it was promised."""
    schema = {"type": "object", "propertyNames": {"minLength": 3}, "unknownThing": 1}
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for extra in (schema, odd):
        lax = constrain(HERMES, [Tool(name="get", schema=extra)], "required", only_one=True)
        assert lax is not None and COMPILER.compile(lax)
