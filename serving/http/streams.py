"""What the engine streams as server-sent events. Closed early, it closes the engine's streams."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from swiftjax.engine.request import StreamOutput
from swiftjax.serving.http.errors import ClientGone, ErrorReply
from swiftjax.serving.http.writing import AnswerWriter
from swiftjax.serving.merging import Indexed

# A client that takes nothing for this long is taken for gone. (Its request was aborted before.)
SEND_SECONDS = 60.0


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
        self._writer = writer
        self._describe = describe
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; cancelled when the client goes away."""
        async with _patience() as patience, aclosing(self._rest):
            deliver = partial(_deliver, send, patience)
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await deliver(start)
            async with aclosing(self._events()) as events:
                async for data in events:
                    await deliver({"type": "http.response.body", "body": data, "more_body": True})
            await deliver({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            yield self._write(*self._first)
            async for indexed in self._rest:
                if data := self._write(*indexed):
                    yield data
        except Exception as error:
            # A client must not take what it got for a whole answer.
            yield _event(self._describe(error).body)
            return
        if self._include_usage:
            yield _event(self._writer.usage_chunk())
        yield b"data: [DONE]\n\n"

    def _write(self, prompt_index: int, output: StreamOutput) -> bytes:
        return b"".join(map(_event, self._writer.chunks(prompt_index, output)))


@asynccontextmanager
async def _patience() -> AsyncGenerator[asyncio.Timeout, None]:
    """A limit that runs while something is delivered; one for all of it, because one costs time."""
    try:
        async with asyncio.timeout(None) as limit:
            yield limit
    except TimeoutError:
        raise ClientGone from None


async def _deliver(send: Send, patience: asyncio.Timeout, message: Message) -> None:
    patience.reschedule(asyncio.get_running_loop().time() + SEND_SECONDS)
    await send(message)
    patience.reschedule(None)


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
