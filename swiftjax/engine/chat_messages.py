"""What a chat template is given: messages and tools, checked and copied into plain values.

Knows no template and no tokens. Called by `chat_template.py` and the tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from swiftjax.errors import InvalidRequestError

MAX_ROLE_CHARS = 64
MAX_ID_CHARS = 256
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")


def check_text(text: object, name: str, max_chars: int) -> str:
    """Return the text, or raise InvalidRequestError naming what cannot be tokenised."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} must be text, not {type(text).__name__}")
    if len(text) > max_chars:
        raise InvalidRequestError(
            f"{name} has {len(text)} characters; at most {max_chars} are taken: shorten it"
        )
    if (place := text.find("\0")) >= 0:
        raise InvalidRequestError(f"{name} has a NUL character at position {place}: remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has a lone surrogate at position {error.start}: it is not valid Unicode"
        ) from None
    return text


def check_messages(messages: object, max_chars: int) -> list[dict[str, Any]]:
    """Copy messages (role, content, name, tool_call_id, tool_calls) as templates take them.

    Text parts are joined by newlines; the arguments of tool calls become objects. Raises
    InvalidRequestError naming the message and the field.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of {role, content}")
    checked: list[dict[str, Any]] = []
    left = max_chars
    for index, message in enumerate(messages):
        checked.append(_check_message(message, f"messages[{index}]", left))
        left -= len(checked[-1]["content"])
        if calls := checked[-1].get("tool_calls"):
            left -= len(json.dumps(calls))
    return checked


def _check_message(message: object, name: str, max_chars: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name} must be an object with role and content")
    fields = {key: value for key, value in message.items() if value is not None}
    if unknown := [key for key in fields if key not in _FIELDS]:
        raise InvalidRequestError(f"{name} has {unknown!r:.80}; known are {', '.join(_FIELDS)}")
    calls = fields.pop("tool_calls", None)
    if calls is not None:
        fields.setdefault("content", "")
    for key in ("role", "content"):
        if key not in fields:
            raise InvalidRequestError(f"{name} has no {key}")
    fields["content"] = _join_parts(fields["content"], f"{name}.content")
    limits = {"content": max_chars, "tool_call_id": MAX_ID_CHARS}
    checked: dict[str, Any] = {
        key: check_text(text, f"{name}.{key}", limits.get(key, MAX_ROLE_CHARS))
        for key, text in fields.items()
    }
    if calls is not None:
        checked["tool_calls"] = _check_calls(calls, f"{name}.tool_calls", max_chars)
    return checked


def _check_calls(calls: object, name: str, max_chars: int) -> list[dict[str, Any]]:
    if isinstance(calls, str | bytes) or not isinstance(calls, Sequence):
        raise InvalidRequestError(f"{name} must be a list")
    return [_check_call(call, f"{name}[{i}]", max_chars) for i, call in enumerate(calls)]


def _check_call(call: object, name: str, max_chars: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{name} must be {{id, type: 'function', function}}")
    called = check_text(function.get("name"), f"{name}.function.name", MAX_ROLE_CHARS)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, Mapping):
        text = check_text(arguments, f"{name}.function.arguments", max_chars)
        arguments = _read_arguments(text, f"{name}.function.arguments")
    checked: dict[str, Any] = {"name": called, "arguments": arguments}
    call_id = call.get("id") if isinstance(call, Mapping) else None
    whole: dict[str, Any] = {"type": "function", "function": checked}
    if call_id is not None:
        whole["id"] = check_text(call_id, f"{name}.id", MAX_ID_CHARS)
    return whole


def _read_arguments(text: str, name: str) -> dict[str, Any]:
    """Templates write arguments themselves, so they want the object, not its text."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{name} must be the text of a JSON object")
    check_text(json.dumps(arguments, ensure_ascii=False), name, len(text) * 6 + 2)
    return arguments


def check_tools(tools: Sequence[Mapping[str, Any]], max_chars: int) -> list[dict[str, Any]]:
    """Copy tools; raises InvalidRequestError for what is too long or cannot be tokenised."""
    try:
        text = json.dumps(list(tools), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"tools must be JSON: {error}") from None
    return json.loads(check_text(text, "tools", max_chars))


def _join_parts(content: object, name: str) -> object:
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequestError(
                f"{name}[{index}] has type {kind!r:.40}; only {{type: 'text', text}} is supported"
            )
        texts.append(text)
    return "\n".join(texts)
