"""What a server serves: made by the CLI when the model is loaded, handed to every transport."""

from typing import NamedTuple, Protocol, runtime_checkable

from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.request import GenerationConfig
from swiftjax.serving.engine_watch import EngineWatch
from swiftjax.serving.merging import Outputs
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.quota import Quota
from swiftjax.serving.session_files import SessionFiles
from swiftjax.serving.tools.formats import ToolParser
from swiftjax.serving.tracing import Operation, Tracer


@runtime_checkable
class WeightChange(Protocol):
    """How the weights of an engine are changed: read others, then use them."""

    async def read(self, path: str) -> None:
        """Read a checkpoint (empty: the same again) while the engine works.

        Raises SwiftJaxError for what cannot take the place of the weights in use.
        """
        ...

    async def use(self) -> pb.GetModelResponse:
        """Use what was read last, while nothing runs; gives what GetModel is to say."""
        ...

    def forget(self) -> None:
        """Give up what was read last."""
        ...


@runtime_checkable
class Pulse(Protocol):
    """How an engine is asked whether it still answers, and ended when it does not."""

    def ping(self) -> None:
        """Ask for news, which are told as any other."""
        ...

    def kill(self) -> None:
        """End it now; that is its death, of which everybody is told as of any other."""
        ...


class Served(NamedTuple):
    """A warm engine, what GetModel says of it, who measures it, and where sessions are saved."""

    engine: AsyncEngine
    model: pb.GetModelResponse
    watch: EngineWatch | None = None
    session_files: SessionFiles | None = None
    tool_parser: ToolParser | None = None  # how the model writes calls, if its template hides it
    tracer: Tracer | None = None
    quota: Quota | None = None
    weights: WeightChange | None = None
    pulse: Pulse | None = None  # of an engine in a process of its own

    def check_size(self, num_answers: int) -> None:
        """Raise InvalidRequestError for a call that asks for more than its key may ever have."""
        if self.quota is not None:
            self.quota.check_size(num_answers)

    def watched(self, stream: Outputs, operation: Operation, config: GenerationConfig) -> Outputs:
        """Pass a stream on, counted for its key and inside a span, where that was asked for."""
        if self.quota is not None:
            stream = self.quota.watch(stream, config.n)
        if self.tracer is not None:
            stream = self.tracer.watch(stream, self.model.name, operation, config)
        return stream
