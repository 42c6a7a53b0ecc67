"""Clients that do little beside reading, so that a measurement is of the server they read from.

They are whole clients all the same: gRPC's own, and one of HTTP that parses every answer and every
event in it. Used by `front_end.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import httptools
import msgspec

from swiftjax.serving.proto import swiftjax_pb2 as pb

GENERATE = "/swiftjax.v1.GenerationService/Generate"

Read = Callable[[int], AsyncIterator[int]]  # (length) -> numbers of tokens, as they come


@asynccontextmanager
async def open_grpc(address: str) -> AsyncIterator[Read]:
    """A client that reads whole messages."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(
            GENERATE,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )

        async def read(length: int) -> AsyncIterator[int]:
            stop = pb.StopOptions(max_new_tokens=length, ignore_eos=True)
            async for response in call(pb.GenerateRequest(text="a", stop=stop)):
                yield len(response.token_ids)

        yield read


@asynccontextmanager
async def open_http(address: str) -> AsyncIterator[Read]:
    """A client with as many connections as it needs. Tokens it cannot tell: an event counts one."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []

    async def read(length: int) -> AsyncIterator[int]:
        if not idle:
            idle.append((await loop.create_connection(Connection, host, int(port)))[1])
        connection = idle.pop()
        try:
            async for _ in connection.ask(length):
                yield 1
            idle.append(connection)
        except BaseException:
            connection.close()
            raise

    try:
        yield read
    finally:
        for connection in idle:
            connection.close()


class Choice(msgspec.Struct):
    """What an event tells of one answer."""

    text: str


class Chunk(msgspec.Struct):
    """What is in an event."""

    choices: list[Choice]


class Connection(asyncio.Protocol):
    """One connection, on which requests follow each other."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(Chunk).decode
        self._transport: asyncio.Transport | None = None
        self._texts: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._is_whole = False
        self._arrived: asyncio.Future[None] | None = None

    async def ask(self, length: int) -> AsyncIterator[str]:
        """Send a request and yield the texts of the answer's events."""
        body = {"prompt": "a", "max_tokens": length, "ignore_eos": True, "stream": True}
        data = msgspec.json.encode(body | {"temperature": 0})
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        assert self._transport is not None
        self._begin()
        self._transport.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        while not self._is_whole:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
            texts, self._texts = self._texts, []
            for text in texts:
                yield text

    def close(self) -> None:
        """Hang up, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the way to the server."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the reader, if one waits."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(exc or ConnectionError("the server hung up"))

    def data_received(self, data: bytes) -> None:
        """Parse, and tell the reader."""
        self._parser.feed_data(data)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def on_headers_complete(self) -> None:
        """The answer begins."""
        assert self._parser.get_status_code() == 200

    def on_body(self, body: bytes) -> None:
        """Take events apart."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]":
                self._texts += [choice.text for choice in self._decode(data).choices]

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._is_whole = True
