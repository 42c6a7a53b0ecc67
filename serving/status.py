"""The one table from our errors to gRPC status codes, and back for the client.

A class missing here would reach clients as INTERNAL; a test walks every subclass of SwiftJaxError.
"""

from grpc import StatusCode

from swiftjax import errors

GRPC_STATUS: dict[type[errors.SwiftJaxError], StatusCode] = {
    errors.InvalidRequestError: StatusCode.INVALID_ARGUMENT,
    errors.UnauthenticatedError: StatusCode.UNAUTHENTICATED,
    errors.ForbiddenError: StatusCode.PERMISSION_DENIED,
    errors.NotFoundError: StatusCode.NOT_FOUND,
    errors.DeadlineError: StatusCode.DEADLINE_EXCEEDED,
    errors.QueueFullError: StatusCode.RESOURCE_EXHAUSTED,
    errors.NotReadyError: StatusCode.UNAVAILABLE,
    errors.EngineDeadError: StatusCode.UNAVAILABLE,
    errors.CheckpointError: StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedError: StatusCode.UNIMPLEMENTED,
}

# Where two classes share a code the first stands for it: a client cannot tell them apart.
_ERRORS = {status: error for error, status in reversed(GRPC_STATUS.items())}

# Status texts travel in a header of limited size, in which one character may take twelve bytes.
MAX_STATUS_CHARS = 500


def grpc_status(error: errors.SwiftJaxError) -> tuple[StatusCode, str]:
    """Give the status code and text that a client sees for an error raised on purpose."""
    for known in type(error).__mro__:
        if known in GRPC_STATUS:
            return GRPC_STATUS[known], str(error)[:MAX_STATUS_CHARS]
    return StatusCode.INTERNAL, str(error)[:MAX_STATUS_CHARS]


def error_from_status(status: StatusCode, details: str | None) -> errors.SwiftJaxError:
    """Give the error a client raises for a status; a code without a class of its own is named."""
    if status in _ERRORS:
        return _ERRORS[status](details or status.name)
    return errors.SwiftJaxError(f"{status.name}: {details}")
