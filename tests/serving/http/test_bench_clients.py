"""The clients of `bench serving`: what they count, and that no failure passes for a fast answer."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from swiftjax.bench.serving import check_length
from swiftjax.bench.serving_clients import Send, open_client, open_http
from swiftjax.errors import SwiftJaxError
from tests.serving.http.harness import HttpService, run

PROMPT = [97]


def client_of(
    service: HttpService, protocol: str
) -> AbstractAsyncContextManager[Send, bool | None]:
    """The client of a protocol."""
    listeners = service.listeners
    assert listeners.http is not None
    ports = {"grpc": listeners.grpc.port, "http": listeners.http.port}
    return open_client(protocol, **{name: f"127.0.0.1:{port}" for name, port in ports.items()})


async def total(send: Send, length: int, prompt: list[int] = PROMPT) -> int:
    """Tokens of one answer."""
    return sum([count async for count in send(prompt, length)])


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_tokens_are_counted_and_refusals_raised(protocol: str) -> None:
    async def body(service: HttpService) -> None:
        async with client_of(service, protocol) as send:
            assert await asyncio.gather(*(total(send, n) for n in (3, 50, 7))) == [3, 50, 7]
            with pytest.raises(SwiftJaxError, match="64"):
                await total(send, 5, [97] * 64)
            assert await total(send, 5) == 5

    run(body, max_model_len=64)


def test_a_connection_serves_one_request_at_a_time() -> None:
    async def body(service: HttpService) -> None:
        assert service.listeners.http is not None
        opened = service.listeners.http._server.server_state.connections
        async with client_of(service, "http") as send:
            await asyncio.gather(*(total(send, 20) for _ in range(3)))
            await total(send, 20)
            assert len(opened) == 3

    run(body)


@pytest.mark.parametrize(
    ("status", "body", "missing", "says"),
    [
        (429, '{"error":{"message":"too many"}}', 0, "429: too many"),
        (502, "oops", 0, "502: oops"),
        (200, 'data: {"error":{"message":"dead"}}\n\n', 0, "stream: dead"),
        (200, 'data: {"choices":[]}\n\n', 10, "hung up"),
        (200, 'data: {"choices":[]}\n\ndata: {"error":{"message":"cut"}}\n', 0, "no stream"),
        (200, '{"choices":[]}', 0, "no stream"),
        (200, "data: {nothing}\n\n", 0, "not understood"),
    ],
)
def test_failures_are_raised(status: int, body: str, missing: int, says: str) -> None:
    """Also those that our server has no reason for now."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body) + missing}\r\n\r\n"
        writer.write((head + body).encode())
        writer.close()

    async def main() -> None:
        async with (
            await asyncio.start_server(reply, "127.0.0.1", 0) as server,
            open_http(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as send,
        ):
            with pytest.raises((SwiftJaxError, ConnectionError), match=says):
                await total(send, 5)

    asyncio.run(main())


def test_an_answer_of_another_length_is_no_figure() -> None:
    check_length(5, 5)
    with pytest.raises(SwiftJaxError, match="an answer of 5 tokens has 0"):
        check_length(5, 0)
