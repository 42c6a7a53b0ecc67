"""Every error a user can meet. No transport code: `serving/status.py` maps them to gRPC and HTTP.

SwiftJaxError
├── InvalidRequestError    a bad value, an over-long prompt, a request that can never fit
│   └── RepeatedTurnError      a session has had a turn of this id
├── UnauthenticatedError   the API key is missing or wrong
├── ForbiddenError         the API key lacks the right
├── NotFoundError          unknown model or request
│   └── UnknownSessionError    no open session of this id is the caller's
├── DeadlineError          the deadline passed while the request was queued or running
│   └── SlowReaderError        nothing of an answer was taken for long
├── QueueFullError         the admission queue is full
│   └── KeyLimitError          one API key has too many requests at a time
├── NotReadyError          loading, warming up or draining
│   └── EngineSilentError      the engine has not answered for long; it may yet, or is replaced
├── EngineDeadError        the engine ended; what it had not answered is lost
├── CheckpointError        a checkpoint is missing, broken or does not fit the model
└── UnsupportedError       this architecture, shape, dtype or GPU is not supported

Messages name the value, the limit and the remedy. `assert` is only for our own bugs.
"""


class SwiftJaxError(Exception):
    """Base of every error raised on purpose."""


class InvalidRequestError(SwiftJaxError, ValueError):
    """A request that cannot be served as written."""


class RepeatedTurnError(InvalidRequestError):
    """A turn of this id is under way or in the session's text."""


class UnauthenticatedError(SwiftJaxError):
    """The API key is missing or wrong."""


class ForbiddenError(SwiftJaxError):
    """The API key is valid but lacks the right."""


class NotFoundError(SwiftJaxError):
    """Unknown model or request."""


class UnknownSessionError(NotFoundError):
    """No open session of this id is the caller's."""


class DeadlineError(SwiftJaxError):
    """The request's deadline passed while it was queued or running."""


class SlowReaderError(DeadlineError):
    """Nothing of an answer was taken for long."""


class QueueFullError(SwiftJaxError):
    """Too many requests are waiting."""


class KeyLimitError(QueueFullError):
    """One API key has too many requests at a time."""


class NotReadyError(SwiftJaxError):
    """The engine is loading, warming up or draining."""


class EngineSilentError(NotReadyError):
    """The engine has not answered for long."""


class EngineDeadError(SwiftJaxError):
    """The engine ended."""


class CheckpointError(SwiftJaxError):
    """A checkpoint is missing, broken or does not fit the model; lists every problem at once."""


class UnsupportedError(SwiftJaxError, NotImplementedError):
    """This architecture, shape, dtype or GPU is not supported."""
