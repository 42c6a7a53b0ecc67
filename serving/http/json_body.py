"""A request's bytes to one of the types of `bodies.py`, at a bounded cost.

Decoded JSON can take fifty times the memory of its text, so a large body is counted before it is
decoded. Every mistake becomes one InvalidRequestError that names the field and no type of ours.
"""

import json
import re
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from swiftjax.errors import InvalidRequestError

# A body below this size cannot become large.
SMALL_BODY = 64 * 2**10
# Texts, numbers, lists and objects in one body: room for 500,000 token ids.
MAX_VALUES = 2**19

Body = TypeVar("Body", bound=msgspec.Struct)

# How the decoder names a place: `$.messages[0].role`, or "`key` in `$.logit_bias`".
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"Object missing required field `(.*?)`")


class FieldError(InvalidRequestError):
    """A mistake in one field, `param`; None when the body as a whole is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def read_body(data: bytes, kind: type[Body]) -> Body:
    """Decode and check types and bounds; raises FieldError."""
    if len(data) > SMALL_BODY:
        _check_number_of_values(data)
    try:
        body = cast(Body, _decoder(kind).decode(data))
        if b"logit_bias" in data:
            _check_biases(_BIASES.decode(data).logit_bias)
        return body
    except msgspec.ValidationError as error:
        raise _field_error(str(error), data) from None
    except msgspec.DecodeError as error:
        raise FieldError(f"the body is not JSON in UTF-8: {error}") from None
    except RecursionError:
        raise FieldError("the body nests lists or objects too deeply") from None


class _Biases(msgspec.Struct):
    """The one object whose names are given by the client, and are numbers."""

    logit_bias: msgspec.Raw = msgspec.Raw(b"{}")


_BIASES = msgspec.json.Decoder(_Biases)


def _check_biases(text: msgspec.Raw) -> None:
    """Refuse a token that is named twice, of which the decoder silently keeps the last."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[int] = set()
        for token_id in (int(name) for name, _ in pairs):
            if token_id in seen:
                raise FieldError(
                    f"logit_bias names token {token_id} twice: give one value for it", "logit_bias"
                )
            seen.add(token_id)

    json.loads(bytes(text), object_pairs_hook=check)


@cache
def _decoder(kind: type[Body]) -> "msgspec.json.Decoder[Body]":
    return msgspec.json.Decoder(kind)


def _check_number_of_values(data: bytes) -> None:
    """Count outside of texts, without making an object for each."""
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    count = bare.count(b'"') // 2
    if count <= MAX_VALUES:
        outside = b"".join(bare.split(b'"')[::2])
        count = sum(outside.count(mark) for mark in (b",", b"[", b"{"))
    if count > MAX_VALUES:
        raise FieldError(f"the body has over {MAX_VALUES} values: send less at a time")


def _field_error(text: str, data: bytes) -> FieldError:
    found = _PLACE.search(text)
    param = found[1] if found else ""
    text = text[: found.start()] if found else text
    for pattern, what in ((_UNKNOWN, "is not known"), (_MISSING, "is missing")):
        if named := pattern.fullmatch(text):
            param = f"{param}.{named[1]:.80}" if param else f"{named[1]:.80}"
            return FieldError(f"{param} {what}", param)
    problem = text[:1].lower() + text[1:].replace("`", "")
    if not param:
        return FieldError(f"the body: {problem}")
    given = _value_at(param, data)
    return FieldError(f"{param:.80}: {problem}{given}", re.split(r"[.\[]", param)[0])


def _value_at(place: str, data: bytes) -> str:
    """Say which number stands at a place such as `messages[0].role`; nothing of a large body.

    Texts may be prompts or keys, which belong in no error.
    """
    if len(data) > SMALL_BODY:
        return ""
    try:
        value = json.loads(data)
        for name, index in _STEP.findall(place):
            value = value[int(index) if index else name]
    except (LookupError, TypeError, ValueError, RecursionError):
        return ""  # what comes after the mistake may be no JSON
    return f"; it is {json.dumps(value):.80}" if isinstance(value, int | float) else ""
