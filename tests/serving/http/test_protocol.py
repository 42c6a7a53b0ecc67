"""Heads, trailers, chunks and requests that never end are cut off, not collected."""

import asyncio
import contextlib

import pytest

from swiftjax.serving.http.protocol import MAX_AHEAD
from tests.serving.http.harness import HttpService, run


@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ",
        b"GET /health?",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx-long: ",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n1;x=",
    ],
    ids=["header", "path", "trailer", "extension"],
)
def test_what_never_ends_is_not_collected(start: bytes) -> None:
    async def body(service: HttpService) -> None:
        assert service.listeners.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", service.listeners.http.port)
        writer.write(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"x" * 10_000)
                await writer.drain()
                await asyncio.sleep(0)
            pytest.fail("it took a megabyte")
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert not answer or answer.startswith(b"HTTP/1.1 400 ")
        writer.close()

    run(body)


def test_only_so_many_requests_may_be_sent_ahead() -> None:
    async def body(service: HttpService) -> None:
        assert service.listeners.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", service.listeners.http.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1 ") <= MAX_AHEAD + 2
        writer.close()

    run(body)
