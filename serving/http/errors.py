"""Errors in OpenAI's form. What was not raised on purpose is a bug: clients see an id only.

A HTTPException stands for what HTTP alone knows: no such path, a body too large.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from swiftjax.errors import EngineDeadError, NotReadyError, QueueFullError, SwiftJaxError
from swiftjax.serving.http.json_body import FieldError
from swiftjax.serving.incidents import report_bug
from swiftjax.serving.status import BUG, statuses_of

# How long a client is asked to wait whose request found the queue full or the engine away.
RETRY_AFTER_SECONDS = 1


class ClientGone(Exception):
    """Nobody is left to be answered."""


class ErrorReply(NamedTuple):
    """What a client is told."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]


def describe(error: Exception) -> ErrorReply:
    """Write an error; logs it when it is a bug."""
    if isinstance(error, HTTPException):
        body = _body(error.detail, "invalid_request_error")
        return ErrorReply(error.status_code, body, error.headers or {})
    if not isinstance(error, SwiftJaxError):
        return ErrorReply(BUG.http, _body(report_bug("an HTTP request", error), BUG.kind), {})
    _, status, kind, code = statuses_of(error)
    headers: dict[str, str] = {}
    if isinstance(error, QueueFullError | NotReadyError | EngineDeadError):
        headers["retry-after"] = str(RETRY_AFTER_SECONDS)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    param = error.param if isinstance(error, FieldError) else None
    return ErrorReply(status, _body(str(error), kind, code, param), headers)


def _body(
    message: str, kind: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
