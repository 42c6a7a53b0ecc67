"""Clients of both protocols that do little beside reading: what is measured is the server.

They are whole clients all the same: gRPC's own, and one of HTTP that parses every answer and every
event in it. Tokens in, greedy, ends of sequence ignored. Used by `serving.py` and by the benchmark
of the front end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

import httptools
import msgspec

from swiftjax.errors import SwiftJaxError

# (prompt, length) -> numbers of tokens, as they come
Send = Callable[[Sequence[int], int], AsyncIterator[int]]

# A server hangs up on a connection that was idle for some seconds, just when it is used perhaps.
MAX_IDLE_SECONDS = 2.0


def open_client(
    protocol: str, *, grpc: str, http: str
) -> AbstractAsyncContextManager[Send, bool | None]:
    """Open the client of a protocol, which is told `host:port` of both."""
    return open_grpc(grpc) if protocol == "grpc" else open_http(http)


@asynccontextmanager
async def open_grpc(address: str) -> AsyncIterator[Send]:
    """Yield a client that raises the errors which the server meant."""
    import grpc

    from swiftjax.serving.proto import swiftjax_pb2 as pb
    from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
    from swiftjax.serving.status import error_from_status

    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)

        async def send(prompt: Sequence[int], length: int) -> AsyncIterator[int]:
            stop = pb.StopOptions(max_new_tokens=length, ignore_eos=True)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), stop=stop)
            try:
                async for response in stub.Generate(request):
                    yield len(response.token_ids)
            except grpc.aio.AioRpcError as error:
                raise error_from_status(error.code(), error.details()) from None

        yield send


@asynccontextmanager
async def open_http(address: str) -> AsyncIterator[Send]:
    """Yield a client with a connection per running request.

    How many tokens an event holds is told at the end, for all of them: until then each counts 0.
    Raises SwiftJaxError for a status that is not 200 and for an error on the way, with the server's
    message, and ConnectionError when the server hangs up.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    idle: list[_Connection] = []

    async def connect() -> _Connection:
        while idle:
            if (connection := idle.pop()).is_fresh(loop.time()):
                return connection
            connection.close()
        return (await loop.create_connection(_Connection, host, int(port)))[1]

    async def send(prompt: Sequence[int], length: int) -> AsyncIterator[int]:
        connection = await connect()
        try:
            async for num_tokens in connection.ask(prompt, length):
                yield num_tokens
        except BaseException:
            connection.close()
            raise
        connection.idle_since = loop.time()
        idle.append(connection)

    try:
        yield send
    finally:
        for connection in idle:
            connection.close()


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """What is kept of an event; of an answer that is no stream too."""

    usage: _Usage | None = None
    error: _Error | None = None


class _Connection(asyncio.Protocol):
    """One connection, on which requests follow each other."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._decode = msgspec.json.Decoder(_Event).decode
        self._lost: Exception | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._counts: list[int] = []
        self._error: str | None = None
        self._is_whole = False
        self._arrived: asyncio.Future[None] | None = None

    def is_fresh(self, now: float) -> bool:
        """Whether the server surely still listens."""
        return self._lost is None and now - self.idle_since < MAX_IDLE_SECONDS

    async def ask(self, prompt: Sequence[int], length: int) -> AsyncIterator[int]:
        """Send a request and yield the number of tokens that each event tells of."""
        body = {
            "prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        data = msgspec.json.encode(body)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._begin()
        self._transport.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        while self._counts or not self._is_whole:
            if not self._counts:
                await self._wait()
            counts, self._counts = self._counts, []
            for count in counts:
                yield count
        if self._error is not None:
            raise SwiftJaxError(f"the server answered {self._error}")

    async def _wait(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._arrived = asyncio.get_running_loop().create_future()
        await self._arrived

    def close(self) -> None:
        """Hang up, whatever is under way."""
        self._transport.abort()

    def connection_made(self, transport: object) -> None:
        """Take the way to the server (uvloop's are none of asyncio's classes)."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the reader, if one waits."""
        self._lost = exc or ConnectionError("the server hung up")
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(self._lost)

    def data_received(self, data: bytes) -> None:
        """Parse, and tell the reader."""
        self._parser.feed_data(data)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def on_body(self, body: bytes) -> None:
        """Take events apart; an answer that is no stream is kept to its end."""
        self._rest += body
        if self._parser.get_status_code() == 200:
            *events, self._rest = self._rest.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    self._read(event.removeprefix(b"data: "))

    def _read(self, data: bytes) -> None:
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            self._error = f"with an event that is not understood ({error})"
            return
        if event.error is not None:
            self._error = f"in the middle of a stream: {event.error.message}"
        self._counts.append(0 if event.usage is None else event.usage.completion_tokens)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._is_whole = True
        if (status := self._parser.get_status_code()) != 200:
            self._error = f"{status}: {self._message()}"
        elif self._rest:
            self._error = f"with what is no stream of events: {self._message()}"

    def _message(self) -> str:
        try:
            told = self._decode(self._rest).error
        except msgspec.DecodeError:
            told = None
        return self._rest[:500].decode(errors="replace") if told is None else told.message
