"""The tools of a chat: what is offered to the model, and what its answer is held to."""

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from swiftjax.engine.constraint import Constraint
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.serving.http.bodies import ChatBody
from swiftjax.serving.http.json_body import FieldError
from swiftjax.serving.http.tool_bodies import NamedTool, OfferedTool
from swiftjax.serving.tools.calls import CallDelta, CallReader
from swiftjax.serving.tools.formats import Tool, ToolFormat, ToolParser, constrain, find_format

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolUse(NamedTuple):
    """How one chat uses tools: what the template is given, and how the answer is read."""

    offered: list[dict[str, Any]]
    style: ToolFormat
    names: frozenset[str]
    max_calls: int | None
    constraint: Constraint | None

    def reader(self) -> CallReader:
        """Begin to read an answer."""
        return CallReader(self.style, self.names, self.max_calls)


def read_tools(body: ChatBody, tokenizer: Tokenizer, parser: ToolParser | None) -> ToolUse | None:
    """Read them; None where the model is to call none. Raises InvalidRequestError."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise FieldError("tool_choice demands a call and there are no tools", "tool_choice")
        return None
    tools = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FieldError(
            f"tools names {twice} twice: give each function a name of its own", "tools"
        )
    if choice == "none":
        return None
    template = tokenizer.files.chat_template or ""
    if not tokenizer.knows_tools:
        raise FieldError(
            "tools: the chat template of this model cannot tell it of any: leave them out, or "
            "start the server with --chat-template",
            "tools",
        )
    style = find_format(template, parser)
    allowed = _choose(tools, choice.function.name) if isinstance(choice, NamedTool) else tools
    effort = "auto" if choice in (None, "auto") else "required"
    only_one = isinstance(choice, NamedTool) or body.parallel_tool_calls is False
    try:
        constraint = constrain(style, allowed, effort, only_one=only_one)
    except RecursionError:
        raise FieldError("tools: a schema nests too deeply", "tools") from None
    return ToolUse(
        offered=offer(body.tools),
        style=style,
        names=frozenset(tool.name for tool in allowed),
        max_calls=1 if only_one else None,
        constraint=constraint,
    )


def _choose(tools: list[Tool], name: str) -> list[Tool]:
    allowed = [tool for tool in tools if tool.name == name]
    if not allowed:
        raise FieldError("tool_choice names a function that is not in tools", "tool_choice")
    return allowed


def offer(tools: Sequence[OfferedTool]) -> list[dict[str, Any]]:
    """Write tools as chat templates take them: without what is not for the model."""
    return [{"type": "function", "function": _describe(tool)} for tool in tools]


def _describe(tool: OfferedTool) -> dict[str, Any]:
    function = tool.function
    fields = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _read_tool(tool: OfferedTool, name: str) -> Tool:
    function = tool.function
    schema = NO_PARAMETERS if function.parameters is None else function.parameters
    if schema.get("type", "object") != "object":
        raise FieldError(f"{name}.function.parameters must be of type object", "tools")
    return Tool(
        name=function.name,
        schema={**schema, "type": "object"},
        strict=bool(function.strict),
    )


def write_call(call: CallDelta) -> dict[str, Any]:
    """One call as a stream tells it: who is called first, then the arguments in pieces."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    call_id = f"call_{uuid.uuid4().hex}"
    return {"index": call.index, "id": call_id, "type": "function", "function": function}


def join_calls(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put calls together from the pieces that a stream tells."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        function = piece["function"]
        if "id" in piece:
            named = {"id": piece["id"], "type": "function"}
            calls[piece["index"]] = named | {"function": dict(function)}
        else:
            calls[piece["index"]]["function"]["arguments"] += function["arguments"]
    return list(calls.values())
