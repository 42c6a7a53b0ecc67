"""What the engine streams as server-sent events. Closed early, it closes the engine's streams."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from time import monotonic

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swiftjax.engine.request import StreamOutput
from swiftjax.errors import SlowReaderError
from swiftjax.serving.http.errors import ClientGone, ErrorReply
from swiftjax.serving.http.events import END, EventWriter, event
from swiftjax.serving.http.writing import AnswerWriter
from swiftjax.serving.merging import Indexed
from swiftjax.serving.pacing import until_all_are_made
from swiftjax.serving.patience import patience


class EventStream(Response):
    """An answer as server-sent events, ended by [DONE]; an error on the way is the last event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: tuple[int, StreamOutput],
        rest: Indexed,
        writer: AnswerWriter,
        describe: Callable[[Exception], ErrorReply],
        *,
        include_usage: bool,
        headers: dict[str, str],
    ) -> None:
        """`first` was awaited before, because it decides whether the status is an error's."""
        self.status_code = 200
        self.background = None
        # Proxies hold answers back to compress or batch them unless they are told not to.
        self.init_headers(headers | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first = first
        self._rest = rest
        self._events_of = EventWriter(writer)
        self._describe = describe
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; cancelled when the client goes away."""
        try:
            await self._send(send)
        except SlowReaderError:
            raise ClientGone from None

    async def _send(self, send: Send) -> None:
        async with patience() as patient, aclosing(self._rest):
            patient.since = monotonic()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._events()) as events:
                async for data in events:
                    await until_all_are_made()
                    patient.since = monotonic()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    patient.since = None
            patient.since = monotonic()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        write = self._events_of.write
        try:
            yield write(*self._first)
            async for prompt_index, output in self._rest:
                if data := write(prompt_index, output):
                    yield data
        except Exception as error:
            # A client must not take what it got for a whole answer.
            yield event(self._describe(error).body)
            return
        if self._include_usage:
            yield self._events_of.usage()
        yield END
