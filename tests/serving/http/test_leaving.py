"""Clients that go away: the work stops and the pages come back, whatever they were waiting for."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from swiftjax.config import ReaderLimits
from swiftjax.serving import patience
from swiftjax.serving.http.protocol import MAX_AHEAD, HttpProtocol
from swiftjax.serving.merging import merge
from tests.serving.harness import VOCAB_SIZE, make_core, until
from tests.serving.http.harness import HttpService, Json, run, serving
from tests.serving.test_slow_reader import LongTexts
from tests.stalls import tried_again_after_stalls

STEP = 0.05
MAX_STEPS = 2
COMPLETE = "/v1/completions"
LONG: Json = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}


async def assert_work_stops(service: HttpService, num_steps: int) -> None:
    """No more than the allowed steps, then none at all."""
    await until(service.is_idle)
    assert service.num_steps - num_steps <= MAX_STEPS
    at_rest = service.num_steps
    await asyncio.sleep(3 * STEP)
    assert service.num_steps == at_rest


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}], ids=str)
@tried_again_after_stalls
def test_b050_stream_closed_after_its_first_event(fields: Json) -> None:
    async def body(service: HttpService) -> None:
        request = LONG | {"stream": True} | fields
        async with service.client.stream("POST", COMPLETE, json=request) as response:
            await anext(response.aiter_lines())
            num_steps = service.num_steps
        await assert_work_stops(service, num_steps)

    run(body, delay=STEP)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
@tried_again_after_stalls
def test_b050_client_gone_before_its_answer_began(queued: bool, stream: bool) -> None:
    async def body(service: HttpService) -> None:
        ahead = asyncio.create_task(service.client.post(COMPLETE, json=LONG))
        await until(lambda: service.engine.stats().num_running == 1)
        mine = asyncio.create_task(
            service.client.post(COMPLETE, json=LONG | {"stream": stream and queued})
        )
        if queued:
            await until(lambda: service.engine.stats().num_waiting == 1)
        else:
            await until(lambda: service.engine.stats().num_running == 2)
        mine.cancel()
        await until(lambda: sum(service.engine.stats()[:2]) == 1)
        ahead.cancel()
        await assert_work_stops(service, service.num_steps)

    run(body, delay=STEP, max_num_seqs=1 if queued else 4)


@pytest.mark.parametrize(("stream", "num_ahead"), [(False, MAX_AHEAD - 1), (True, 1)])
def test_b050_client_gone_that_had_sent_other_requests_ahead(stream: bool, num_ahead: int) -> None:
    async def body(service: HttpService) -> None:
        assert service.listeners.http is not None
        _, writer = await asyncio.open_connection("127.0.0.1", service.listeners.http.port)
        content = json.dumps(LONG | {"stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        await until(lambda: service.engine.stats().num_running == 1)
        [connection] = service.listeners.http._server.server_state.connections
        assert isinstance(connection, HttpProtocol)
        for count in range(1, num_ahead + 1):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda count=count: len(connection.pipeline) == count)
        writer.transport.abort()
        await assert_work_stops(service, service.num_steps)
        writer.close()

    run(body, delay=STEP)


def test_b050_normal_finishes_send_no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []

    async def body(service: HttpService) -> None:
        abort = service.engine._link.abort
        monkeypatch.setattr(service.engine._link, "abort", lambda i: (aborted.append(i), abort(i)))
        requests = [{"prompt": "a", "max_tokens": 3, "stream": i % 2 == 0} for i in range(50)]
        await asyncio.gather(*(service.client.post(COMPLETE, json=r) for r in requests))
        assert aborted == [] and service.is_idle()

    run(body)


def test_clients_that_leave_at_random_moments_leave_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def one(service: HttpService, index: int) -> None:
        request = LONG | {"stream": index % 2 == 0, "n": 1 + index % 3}
        call = asyncio.create_task(service.client.post(COMPLETE, json=request))
        await asyncio.sleep((index * 37 % 100) / 1000)
        call.cancel()

    async def body(service: HttpService) -> None:
        for start in range(0, 200, 20):
            await asyncio.gather(*(one(service, start + i) for i in range(20)))
        await until(service.is_idle)
        assert await service.listeners.drain("over", 5)  # nobody is left inside the gate

    with caplog.at_level(logging.WARNING):
        run(body, delay=0.001)
    assert not caplog.records


def test_p9_client_that_stops_reading_is_aborted_and_then_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "SEND_SECONDS", 0.5)

    async def main() -> None:
        core = make_core(max_model_len=20_000, num_pages=100_000, max_num_seqs=16)
        core._runner = LongTexts(VOCAB_SIZE)
        readers = ReaderLimits(max_unread_tokens=50, max_paused_seconds=0.3)
        async with serving(core, readers=readers) as service:
            assert service.listeners.http is not None
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # soon full
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", service.listeners.http.port))
            reader, writer = await asyncio.open_connection(sock=client, limit=1024)
            body = json.dumps(LONG | {"max_tokens": 19_000, "n": 16, "stream": True})
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            await reader.readline()
            await until(lambda: service.engine.stats().num_running == 0)  # paused, or aborted
            other = await service.post(COMPLETE, {"prompt": "a", "max_tokens": 5})
            assert other["usage"]["completion_tokens"] == 5
            await until(service.is_idle)
            assert await service.listeners.drain("over", 5)  # it is not inside the gate any more
            writer.transport.abort()
            await asyncio.sleep(0)

    asyncio.run(main())


def test_merged_streams_end_together() -> None:
    """One that fails ends the others; so does a reader that stops."""
    closed: list[int] = []

    async def numbers(index: int, count: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(count):
                yield number
                await asyncio.sleep(0)
            raise ValueError("the first to end")
        finally:
            closed.append(index)

    async def main() -> None:
        counts = (3, 10**9, 10**9)
        with pytest.raises(ValueError, match="the first to end"):
            async for _ in merge([numbers(i, c) for i, c in enumerate(counts)]):  # type: ignore[misc]
                pass
        assert sorted(closed) == [0, 1, 2]
        closed.clear()
        async with aclosing(merge([numbers(i, 10**9) for i in range(3)])) as merged:  # type: ignore[misc]
            seen = [await anext(merged) for _ in range(30)]
        assert {index for index, _ in seen} == {0, 1, 2}
        assert sorted(closed) == [0, 1, 2]

    asyncio.run(main())


@tried_again_after_stalls
def test_engine_that_dies_ends_answers_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret of the machine")

    async def body(service: HttpService) -> None:
        whole = asyncio.create_task(service.client.post(COMPLETE, json=LONG))
        request = LONG | {"stream": True}
        async with service.client.stream("POST", COMPLETE, json=request) as response:
            lines = response.aiter_lines()
            await anext(lines)
            monkeypatch.setattr(service.core, "step", fail)
            async with asyncio.timeout(1):
                last = [line async for line in lines if line][-1]
                answer = await whole
        # A stream that was cut off must not look like one that ended.
        assert '"error"' in last and "[DONE]" not in last and "secret" not in last
        assert answer.status_code == 503
        assert (await service.client.post(COMPLETE, json=LONG)).status_code == 503
        assert (await service.client.get("/ready")).status_code == 503
        assert (await service.client.get("/health")).status_code == 200

    run(body, delay=0.001)
