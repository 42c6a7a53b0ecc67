"""What is said between a front end and its engine, as typed values; the same in one process or two.

Orders go to the engine, news come back. msgspec writes them as arrays of plain values, so nothing
that arrives can name code. Sent by the links of `engine_link.py` and `process_link.py`.
"""

from typing import NamedTuple

import msgspec

from swiftjax import errors
from swiftjax.engine.core import CoreStats
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.request import Request, StepOutput
from swiftjax.engine.session_file import SessionState
from swiftjax.engine.step_meter import StepReport
from swiftjax.errors import SwiftJaxError
from swiftjax.memory import DeviceReport
from swiftjax.model_config import ModelConfig
from swiftjax.tokenizer_files import TokenizerFiles


class EngineInfo(NamedTuple):
    """What a front end has to know of an engine."""

    limits: EngineLimits
    model: ModelConfig
    tokenizer_files: TokenizerFiles
    max_num_seqs: int


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Whatever crosses; its class travels along as a name."""


class Problem(Message, frozen=True):
    """An error that was raised on purpose, by its name in `errors.py`."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: SwiftJaxError) -> "Problem":
        """Write an error."""
        return cls(type(error).__name__, str(error))

    def error(self) -> SwiftJaxError:
        """Read it."""
        kind = getattr(errors, self.kind, SwiftJaxError)
        return kind(self.text)


class Start(Message, frozen=True):
    """A process is to build its engine; `job` is for whoever builds it."""

    job: bytes


class Submit(Message, frozen=True):
    """A request is to be answered: by outputs, or by one `Refused`."""

    request: Request


class Abort(Message, frozen=True):
    """A request, or one choice of it, is to end; it still gets a last output."""

    request_id: str
    index: int | None = None


class Pause(Message, frozen=True):
    """Nothing is to be computed for a request for now."""

    request_id: str


class Resume(Message, frozen=True):
    """A paused request is to go on."""

    request_id: str


class ForgetPrefixes(Message, frozen=True):
    """No prompt is to start from cached pages that there are now."""


class CloseSession(Message, frozen=True):
    """A session keeps nothing from now on."""

    session: str


class ForkSession(Message, frozen=True):
    """Another session starts from what one keeps."""

    session: str
    fork: str


class SaveSession(Message, frozen=True):
    """A session is to be written to a file; answered by one `SessionDone`."""

    session: str
    path: str
    state: SessionState


class LoadSession(Message, frozen=True):
    """A file is to be read into a new session; answered by one `SessionDone`."""

    session: str
    path: str


class SessionDone(Message, frozen=True):
    """A session was saved, or loaded: then this is what it is; or neither."""

    session: str
    state: SessionState | None = None
    problem: Problem | None = None


class ReadWeights(Message, frozen=True):
    """A process is to read other weights, beside those in use; answered by one `WeightsDone`."""

    path: str


class UseWeights(Message, frozen=True):
    """It is to use what it read last, once nothing runs; answered by one `WeightsDone`."""


class ForgetWeights(Message, frozen=True):
    """What it read last will not be used."""


class Ping(Message, frozen=True):
    """The engine is to show that it takes orders: by news, even if there are none."""


class Close(Message, frozen=True):
    """The engine is to end after its step."""


class Refused(Message, frozen=True):
    """The engine did not take a request."""

    request_id: str
    problem: Problem


class News(Message, frozen=True):
    """What the engine has done since it last told; `ended` says why nothing will follow."""

    stats: CoreStats
    outputs: list[StepOutput] = []
    refused: list[Refused] = []
    report: StepReport | None = None
    devices: DeviceReport | None = None  # now and then
    ended: str | None = None
    sessions: list[SessionDone] = []


class WeightsDone(Message, frozen=True):
    """Weights were read, or are in use now; or neither."""

    problem: Problem | None = None


class Ready(Message, frozen=True):
    """A process has built its engine and takes orders."""

    info: EngineInfo
    stats: CoreStats


SessionOrder = CloseSession | ForkSession | SaveSession | LoadSession
Order = Submit | Abort | Pause | Resume | ForgetPrefixes | SessionOrder | Ping | Close
WeightOrder = ReadWeights | UseWeights | ForgetWeights  # to a process only
# What a process sends; a Problem, when it cannot be ready.
Tidings = Ready | Problem | News | WeightsDone
