"""Clients that leave, deadlines, and messages over the limit: work stops, pages come back."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.serving.client import Client
from swiftjax.serving.messages import MAX_CHARS_PER_TOKEN, MAX_MESSAGE_BYTES
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from tests.serving.harness import (
    LONG_ID,
    LONG_TEXT,
    PATIENCE,
    Service,
    join,
    long_request,
    make_core,
    serving,
    status_of,
    until,
)
from tests.stalls import tried_again_after_stalls

STEP = 0.05  # long enough that a message travels within one step on a busy machine
MAX_STEPS = 2


def run(body: Callable[[Service], Awaitable[None]], **core: Any) -> None:
    """Run a test against a fresh server whose steps take STEP seconds."""

    async def main() -> None:
        async with serving(make_core(**{"delay": STEP} | core)) as service:
            await body(service)

    asyncio.run(main())


async def assert_work_stops(service: Service, num_steps: int) -> None:
    """Idle within MAX_STEPS of the given count, and no step after that."""
    await until(service.is_idle)
    assert service.num_steps - num_steps <= MAX_STEPS
    at_rest = service.num_steps
    await asyncio.sleep(3 * STEP)
    assert service.num_steps == at_rest


@pytest.mark.parametrize("queued", [False, True], ids=["running", "queued"])
@pytest.mark.parametrize("way", ["cancel", "close the channel"])
@tried_again_after_stalls
def test_b058_b050_client_that_leaves_frees_its_pages(queued: bool, way: str) -> None:
    async def body(service: Service) -> None:
        ahead = service.stub.Generate(long_request())
        await anext(aiter(ahead))
        async with grpc.aio.insecure_channel(service.server.address) as channel:
            call = pb_grpc.GenerationServiceStub(channel).Generate(long_request())
            if queued:
                await until(lambda: service.engine.stats().num_waiting == 1)
                ahead.cancel()
                call.cancel() if way == "cancel" else await channel.close()
            else:
                await anext(aiter(call))
                ahead.cancel()
                call.cancel() if way == "cancel" else await channel.close()
            await assert_work_stops(service, service.num_steps)
            if way == "cancel":
                assert await call.code() == grpc.StatusCode.CANCELLED

    run(body, max_num_seqs=1 if queued else 4)


@pytest.mark.parametrize("queued", [False, True], ids=["running", "queued"])
@tried_again_after_stalls
def test_p8_b058_deadline_stops_the_work(queued: bool) -> None:
    async def body(service: Service) -> None:
        ahead = service.stub.Generate(long_request())
        await anext(aiter(ahead))
        started = time.monotonic()
        call = service.stub.Generate(long_request(), timeout=0.3)
        code, _ = await status_of(call)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.25 < time.monotonic() - started < 1.0
        ahead.cancel()
        await assert_work_stops(service, service.num_steps)

    run(body, max_num_seqs=1 if queued else 4)


def test_p8_expired_request_in_the_queue_is_never_computed() -> None:
    async def body(service: Service) -> None:
        ahead = service.stub.Generate(long_request())
        await anext(aiter(ahead))
        code, _ = await status_of(service.stub.Generate(long_request(), timeout=0.2))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: service.engine.stats().num_waiting == 0)
        ahead.cancel()
        await until(service.is_idle)
        # One sequence in every step: the request that ran, never the one that expired.
        batches = service.core._runner.batches  # type: ignore[attr-defined]
        assert all((batch.context_lens > 0).sum() == 1 for batch in batches)

    run(body, max_num_seqs=1)


def test_b050_normal_finishes_send_no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []

    async def body(service: Service) -> None:
        abort = service.engine._link.abort
        monkeypatch.setattr(service.engine._link, "abort", lambda i: (aborted.append(i), abort(i)))
        stop = pb.StopOptions(max_new_tokens=3)
        calls = [
            join(service.stub.Generate(pb.GenerateRequest(text="a", stop=stop))) for _ in range(50)
        ]
        for answer, last in await asyncio.gather(*calls):
            assert (answer, last.finish_reason) == ("bcd", pb.FINISH_REASON_LENGTH)
        assert aborted == [] and service.is_idle()
        # A stop string is found on this side of the engine, which has to be told.
        stop = pb.StopOptions(strings=["c"], max_new_tokens=100)
        await join(service.stub.Generate(pb.GenerateRequest(text="a", stop=stop)))
        assert len(aborted) == 1

    run(body, delay=0.0)


def test_p2_cancels_at_random_moments_leave_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def one(service: Service, index: int) -> None:
        call = service.stub.Generate(long_request(), timeout=(index % 7) / 50 + 0.01)
        await asyncio.sleep((index * 37 % 100) / 1000)
        call.cancel()

    async def body(service: Service) -> None:
        for start in range(0, 200, 20):
            await asyncio.gather(*(one(service, start + i) for i in range(20)))
        await until(service.is_idle)

    with caplog.at_level(logging.WARNING):
        run(body, delay=0.001)
    assert not caplog.records


def test_b058_text_of_5_mb_is_refused_and_the_server_is_well() -> None:
    async def body(service: Service) -> None:
        text = "x" * (5 * 10**6)
        code, details = await status_of(service.stub.Generate(pb.GenerateRequest(text=text)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert str(len(text)) in details and str(4096 * MAX_CHARS_PER_TOKEN) in details
        assert (await join(service.stub.Generate(pb.GenerateRequest(text="\x7e"))))[0]

    run(body, delay=0.0)


def test_b058_reply_over_4_mib_reaches_clients_that_allow_it() -> None:
    ids = [LONG_ID] * 20_000

    async def body(service: Service) -> None:
        request = pb.DetokenizeRequest(token_ids=ids)
        code, details = await status_of(service.stub.Detokenize(request))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "4194304" in details

        def ask_with_our_client() -> int:
            with Client(service.server.address) as client:
                return len(client.detokenize(ids))

        assert await asyncio.to_thread(ask_with_our_client) == len(ids) * len(LONG_TEXT)

    run(body, delay=0.0)


def test_b058_one_byte_over_the_limit() -> None:
    async def body(service: Service) -> None:
        options = (("grpc.max_send_message_length", -1),)
        async with grpc.aio.insecure_channel(service.server.address, options) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            request = pb.GenerateRequest(text="x")
            overhead = pb.GenerateRequest(text="x" * 2**22).ByteSize() - 2**22
            request.text = "x" * (MAX_MESSAGE_BYTES - overhead)
            assert request.ByteSize() == MAX_MESSAGE_BYTES
            code, _ = await status_of(stub.Generate(request))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            request.text += "x"
            code, details = await status_of(stub.Generate(request))
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(MAX_MESSAGE_BYTES) in details
            assert (await stub.GetModel(pb.GetModelRequest())).name == "bytes"

    run(body, delay=0.0)


@tried_again_after_stalls
def test_slow_reader_stalls_nobody() -> None:
    async def body(service: Service) -> None:
        slow = service.stub.Generate(long_request())
        await anext(aiter(slow))
        stop = pb.StopOptions(max_new_tokens=100, ignore_eos=True)
        started = time.monotonic()
        await join(service.stub.Generate(pb.GenerateRequest(text="a", stop=stop)))
        assert time.monotonic() - started < 5.0
        # Everything that arrived meanwhile comes in few messages once it is read.
        slow.cancel()

    run(body, delay=0.001)


def test_engine_that_dies_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret of the machine")

    async def body(service: Service) -> None:
        calls = [service.stub.Generate(long_request()) for _ in range(3)]
        for call in calls:
            await anext(aiter(call))
        monkeypatch.setattr(service.core, "step", fail)
        for call in calls:
            code, details = await status_of(call)
            assert code == grpc.StatusCode.UNAVAILABLE
            assert "RuntimeError" in details and "secret" not in details
        engine: AsyncEngine = service.engine
        assert not engine.is_alive
        await asyncio.wait_for(engine.wait_ended(), PATIENCE)
        code, _ = await status_of(service.stub.Generate(long_request()))
        assert code == grpc.StatusCode.UNAVAILABLE

    run(body, delay=0.001)
