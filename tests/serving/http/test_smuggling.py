"""Requests that two parsers might read in two ways are refused, and nothing behind them is read."""

import asyncio

import pytest

from swiftjax.serving.http.protocol import MAX_AHEAD
from tests.serving.harness import PATIENCE, make_core, until
from tests.serving.http.harness import HttpService, serving
from tests.stalls import tried_again_after_stalls

BODY = b'{"prompt": "a", "max_tokens": 2}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
HIDDEN = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
LONG = b"a" * 100_000

REFUSED = {
    "two lengths": POST + b"content-length: 3\r\ncontent-length: 32\r\n\r\n" + BODY,
    "length and chunks": POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNK,
    "chunks, almost": POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNK,
    "chunks, then more": POST + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNK,
    "negative length": POST + b"content-length: -3\r\n\r\n" + BODY,
    "signed length": POST + b"content-length: +32\r\n\r\n" + BODY,
    "other digits": POST + "content-length: ³²\r\n\r\n".encode() + BODY,
    "huge length": POST + b"content-length: 99999999999999999999999\r\n\r\n" + BODY,
    "huge chunk": POST + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + BODY,
    "negative chunk": POST + b"transfer-encoding: chunked\r\n\r\n-3\r\n" + BODY,
    "long extension": POST + b"transfer-encoding: chunked\r\n\r\n3;" + LONG + b"\r\n",
    "space before the colon": b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\n\r\n",
    "bare CR": b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\rhost: y\r\n\r\n",
    "NUL": b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "long path": b"GET /" + LONG + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "long method": LONG + b" / HTTP/1.1\r\nhost: x\r\n\r\n",
}


async def talk(service: HttpService, data: bytes) -> bytes:
    """All that comes until the server closes, or has nothing to say for a while."""
    assert service.listeners.http is not None
    port = service.listeners.http.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    found = b""
    try:
        while part := await asyncio.wait_for(reader.read(2**16), 0.7):
            found += part
    except (TimeoutError, ConnectionError):
        pass
    writer.transport.abort()
    return found


@tried_again_after_stalls
def test_what_could_be_read_in_two_ways_is_refused() -> None:
    async def main() -> None:
        async with serving(make_core()) as service:
            for name, data in REFUSED.items():
                answer = await talk(service, data + HIDDEN)
                status = answer.split(b"\r\n", 1)[0]
                assert answer == b"" or status.split(b" ")[1][:1] == b"4", (name, answer[:200])
                assert b'"version"' not in answer, name
            assert service.num_steps == 0
            assert b"200 OK" in await talk(
                service, POST + b"transfer-encoding: chunked\r\n\r\n" + CHUNK
            )

    asyncio.run(main())


@tried_again_after_stalls
def test_requests_sent_at_once_are_answered_in_turn() -> None:
    count = MAX_AHEAD + 1

    async def main() -> None:
        async with serving(make_core()) as service:
            answer = await talk(service, HIDDEN * count)
            assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b'"version"') == count

    asyncio.run(main())


@pytest.mark.parametrize("behind", [b"BAD\r\n\r\n", HIDDEN * 2 + b"BAD\r\n\r\n", HIDDEN * 40])
def test_nothing_is_written_into_an_answer(behind: bytes) -> None:
    body = b'{"prompt": "a", "max_tokens": 40, "stream": true}'

    async def main() -> None:
        async with serving(make_core(delay=0.02)) as service:
            assert service.listeners.http is not None
            port = service.listeners.http.port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            answer = await reader.readuntil(b"data: ")
            writer.write(behind)
            answer += await asyncio.wait_for(reader.read(), PATIENCE)
            assert answer.count(b"HTTP/1.1 ") == 1 and b"[DONE]" not in answer
            writer.close()
            await until(service.is_idle)

    asyncio.run(main())
