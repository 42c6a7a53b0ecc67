"""Clients that send too slowly, or take nothing: their connections are given back."""

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swiftjax.serving.http import http_server, protocol
from swiftjax.serving.listeners import Listen, Listeners
from tests.serving.harness import make_core, until
from tests.serving.http.harness import serving
from tests.stalls import tried_again_after_stalls

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def connection(
    delay: float = 0.0,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server whose steps take so many seconds."""
    async with serving(make_core(delay=delay)) as service:
        assert service.listeners.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", service.listeners.http.port)
        yield reader, writer
        writer.close()


async def is_open(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Read for so long at most: whether the server has not closed the connection."""
    try:
        return await asyncio.wait_for(reader.read(2**16), seconds) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("sent", [b"", b"G", HEAD], ids=["nothing", "a byte", "headers"])
@tried_again_after_stalls
def test_a_head_that_does_not_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.4)

    async def main() -> None:
        async with connection() as (reader, writer):
            begun = time.monotonic()
            writer.write(sent)
            while await is_open(reader, 0.1):
                assert time.monotonic() - begun < 2.0
                if sent == HEAD:
                    writer.write(b"x: y\r\n")  # a little now and then does not help
            assert time.monotonic() - begun > 0.3

    asyncio.run(main())


@tried_again_after_stalls
def test_an_answer_is_not_cut_off_by_the_slow_head_of_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)

    async def main() -> None:
        async with connection(delay=0.02) as (reader, writer):
            body = b'{"prompt": "a", "max_tokens": 40}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await asyncio.sleep(0.1)
            writer.write(HEAD)
            answer = await asyncio.wait_for(reader.read(), 5.0)  # then the connection is closed
            assert answer.startswith(b"HTTP/1.1 200") and b'"completion_tokens":40' in answer

    asyncio.run(main())


@pytest.mark.parametrize("rest", [b"x", b"xy", b"xyGET"], ids=["a part", "all", "more"])
@tried_again_after_stalls
def test_a_connection_ends_when_nothing_follows_the_rest_of_an_answered_body(
    monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)

    async def main() -> None:
        async with connection() as (reader, writer):
            writer.write(HEAD + b"content-length: 2\r\n\r\n")
            answer = await reader.readuntil(b"}")  # before the body has come
            assert answer.startswith(b"HTTP/1.1 200")
            writer.write(rest)
            assert await asyncio.wait_for(reader.read(), 5.0) == b""

    asyncio.run(main())


@tried_again_after_stalls
def test_the_rest_of_an_answered_body_is_not_waited_for_byte_by_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)

    async def main() -> None:
        async with connection() as (reader, writer):
            writer.write(HEAD + b"content-length: 1000\r\n\r\n")
            await reader.readuntil(b"}")
            begun = time.monotonic()
            while await is_open(reader, 0.05):
                assert time.monotonic() - begun < 5.0
                writer.write(b"x")

    asyncio.run(main())


def test_a_body_that_comes_behind_its_answer_ends_nothing() -> None:
    async def main() -> None:
        async with connection() as (reader, writer):
            for _ in range(3):
                writer.write(HEAD + b"content-length: 100000\r\n\r\n")
                answer = await reader.readuntil(b"}")
                assert answer.startswith(b"HTTP/1.1 200")
                for _ in range(4):
                    writer.write(b"x" * 25_000)
                    await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="sets an option of Linux")
@tried_again_after_stalls
def test_who_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind an answer that is complete here, and would lie in memory for ever."""
    monkeypatch.setattr(http_server, "UNREAD_SECONDS", 1)

    async def main() -> None:
        async with serving(make_core()) as service:
            assert service.listeners.http is not None
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop, port = asyncio.get_running_loop(), service.listeners.http.port
            await loop.sock_connect(client, ("127.0.0.1", port))
            request = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
            await loop.sock_sendall(client, request * (protocol.MAX_AHEAD + 1))
            connections = service.listeners.http._server.server_state.connections
            await until(lambda: bool(connections))
            begun = time.monotonic()
            while connections:
                assert time.monotonic() - begun < 8.0
                await asyncio.sleep(0.05)
            client.close()

    asyncio.run(main())


@tried_again_after_stalls
def test_a_port_has_so_many_connections_and_no_more() -> None:
    """Those that send nothing as well: each takes a file, and the rest of the server needs some."""

    async def is_closed(port: int) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            kept.append(writer)
            return await asyncio.wait_for(reader.read(1), 0.3) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    async def main() -> None:
        listeners = Listeners(Listen(http_port=0, max_connections=2))
        await listeners.start()
        assert listeners.http is not None
        try:
            for port in (listeners.grpc.port, listeners.http.port):
                assert [await is_closed(port) for _ in range(4)] == [False, False, True, True]
                for writer in kept:
                    writer.close()
                kept.clear()
                deadline = time.monotonic() + 5.0
                while await is_closed(port):
                    assert time.monotonic() < deadline
        finally:
            for writer in kept:
                writer.close()
            await listeners.stop()

    kept: list[asyncio.StreamWriter] = []
    asyncio.run(main())
