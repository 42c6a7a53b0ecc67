"""How families of models write tool calls, and the grammars that hold an answer to them.

Which family a model is of shows in its chat template, unless the operator says so. The grammars are
llguidance's Lark, with each tool's JSON schema for its arguments.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swiftjax.engine.constraint import Constraint
from swiftjax.errors import InvalidRequestError

ToolParser = Literal["hermes", "llama3_json"]
Effort = Literal["auto", "required"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function on offer. A `strict` one is held to its schema even where no call is demanded."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """A call is `opening`, an object with `name` and the key of its arguments, `closing`.

    Where `opening` is empty, an answer that starts with such an object is a call.
    """

    name: ToolParser
    arguments_key: str
    opening: str = ""
    closing: str = ""
    separator: str


HERMES = ToolFormat(
    name="hermes",
    arguments_key="arguments",
    opening="<tool_call>",
    closing="</tool_call>",
    separator="\n",
)
LLAMA3_JSON = ToolFormat(name="llama3_json", arguments_key="parameters", separator="; ")
FORMATS: dict[str, ToolFormat] = {known.name: known for known in (HERMES, LLAMA3_JSON)}


def find_format(template: str, parser: ToolParser | None) -> ToolFormat:
    """Tell how a model of this chat template writes calls; `parser` overrides what is found.

    Raises InvalidRequestError where neither says it.
    """
    if parser is not None:
        return FORMATS[parser]
    if HERMES.opening in template:
        return HERMES
    if '"parameters"' in template and '"name"' in template and "[TOOL_CALLS]" not in template:
        return LLAMA3_JSON
    raise InvalidRequestError(
        "the chat template of this model does not say how calls of tools are written: leave tools "
        f"out, or start the server with --tool-call-parser ({' or '.join(FORMATS)})"
    )


def constrain(
    style: ToolFormat, tools: Sequence[Tool], effort: Effort, *, only_one: bool
) -> Constraint | None:
    """Hold an answer to calls of these tools; None where nothing needs to be held.

    With "auto" the answer may be any text, but a call in it must be right; that costs freedom of
    form (blanks), so it is done only if a tool is strict.
    """
    if effort == "auto" and not any(tool.strict for tool in tools):
        return None
    rules = [_rule(style, index, tool) for index, tool in enumerate(tools)]
    names = " | ".join(f"tool_{index}" for index in range(len(tools)))
    if effort == "required":
        more = "" if only_one else f" ({json.dumps(style.separator)} call)*"
        rules.append(f"start: call{more}")
        opening = json.dumps(f"{style.opening}\n") if style.opening else ""
    elif style.opening:
        # A lazy rule ends with the first opening in the text.
        repeat = "call | TEXT" if only_one else "call* TEXT"
        rules += [f"start: {repeat}", "TEXT: /(.|\\n)*/"]
        rules.append(f"opening[lazy]: TEXT {json.dumps(style.opening)}")
        opening = 'opening "\\n"'
    else:
        more = "" if only_one else f" ({json.dumps(style.separator)} call)*"
        # Any text that does not start like a call.
        rules.append(f"start: call{more} | TEXT")
        rules.append('TEXT: /(.|\\n)*/ & ~/\\s*\\{\\s*"name"(.|\\n)*/')
        opening = ""
    closing = json.dumps(f"\n{style.closing}") if style.closing else ""
    rules.append(f"call: {opening} ({names}) {closing}")
    return Constraint(kind="tool_calls", text="\n".join(rules))


def _rule(style: ToolFormat, index: int, tool: Tool) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "{style.arguments_key}": '
    # What a schema has beyond what can be held to is refused only where it was promised.
    schema = tool.schema if tool.strict else {**tool.schema, "x-guidance": {"lenient": True}}
    return f'tool_{index}: {json.dumps(head)} %json {json.dumps(schema)} "}}"'
