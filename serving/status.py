"""The one table from our errors to statuses of gRPC and HTTP, and back for the gRPC client.

A class missing here would reach clients as a bug of the server; a test walks every subclass of
SwiftJaxError.
"""

from typing import NamedTuple

from grpc import StatusCode

from swiftjax import errors


class Statuses(NamedTuple):
    """What an error is on each transport; `kind` and `code` are names that OpenAI clients read."""

    grpc: StatusCode
    http: int
    kind: str
    code: str | None = None


BUG = Statuses(StatusCode.INTERNAL, 500, "server_error")
_INVALID = "invalid_request_error"

STATUSES: dict[type[errors.SwiftJaxError], Statuses] = {
    errors.InvalidRequestError: Statuses(StatusCode.INVALID_ARGUMENT, 400, _INVALID),
    # Not 409, which OpenAI's client takes for a reason to try once more.
    errors.RepeatedTurnError: Statuses(StatusCode.ALREADY_EXISTS, 400, _INVALID, "turn_repeated"),
    errors.UnauthenticatedError: Statuses(
        StatusCode.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key"
    ),
    errors.ForbiddenError: Statuses(StatusCode.PERMISSION_DENIED, 403, "permission_error"),
    errors.NotFoundError: Statuses(StatusCode.NOT_FOUND, 404, _INVALID, "model_not_found"),
    errors.UnknownSessionError: Statuses(StatusCode.NOT_FOUND, 404, _INVALID, "session_not_found"),
    errors.DeadlineError: Statuses(StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    errors.SlowReaderError: Statuses(StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    errors.QueueFullError: Statuses(
        StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "queue_full"
    ),
    errors.KeyLimitError: Statuses(
        StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "key_limit"
    ),
    errors.NotReadyError: Statuses(StatusCode.UNAVAILABLE, 503, "service_unavailable_error"),
    errors.EngineSilentError: Statuses(
        StatusCode.UNAVAILABLE, 503, "service_unavailable_error", "engine_silent"
    ),
    errors.EngineDeadError: Statuses(StatusCode.UNAVAILABLE, 503, "service_unavailable_error"),
    errors.CheckpointError: Statuses(StatusCode.FAILED_PRECONDITION, 503, "server_error"),
    errors.UnsupportedError: Statuses(StatusCode.UNIMPLEMENTED, 501, _INVALID, "unsupported"),
}

# Where two classes share a code the first stands for it: a client cannot tell them apart.
_ERRORS = {status.grpc: error for error, status in reversed(STATUSES.items())}

# Status texts travel in a header of limited size, in which one character may take twelve bytes.
MAX_STATUS_CHARS = 500


def grpc_status(error: errors.SwiftJaxError) -> tuple[StatusCode, str]:
    """Give the status code and text that a client sees for an error raised on purpose."""
    return statuses_of(error).grpc, str(error)[:MAX_STATUS_CHARS]


def statuses_of(error: errors.SwiftJaxError) -> Statuses:
    """Give the row of the table for an error."""
    return next((STATUSES[c] for c in type(error).__mro__ if c in STATUSES), BUG)


def error_from_status(status: StatusCode, details: str | None) -> errors.SwiftJaxError:
    """Give the error a client raises for a status; a code without a class of its own is named."""
    if status in _ERRORS:
        return _ERRORS[status](details or status.name)
    return errors.SwiftJaxError(f"{status.name}: {details}")
