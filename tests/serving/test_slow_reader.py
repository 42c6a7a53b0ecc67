"""Readers that fall behind: their own request pauses, and ends; nobody else notices."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import call, create_autospec

import grpc
import pytest

from swiftjax.batch import Batch, PageMoves
from swiftjax.config import ReaderLimits
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.engine_link import EngineLink
from swiftjax.engine.mailbox import Mailbox
from swiftjax.engine.request import GenerationConfig, StepOutput, StreamOutput
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError
from swiftjax.serving import patience
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from tests.fakes import FakePending, FakeRunner, count_up, make_request
from tests.serving.harness import (
    LONG_ID,
    VOCAB_SIZE,
    Service,
    make_core,
    make_engine,
    serving,
    until,
)
from tests.stalls import tried_again_after_stalls

LONG = GenerationConfig(max_new_tokens=2000, ignore_eos=True)
LIMIT = 32
SLACK = 100  # tokens that steps make before a pause takes effect


def run(
    body: Callable[[AsyncEngine], Awaitable[None]], max_paused_seconds: float, **core: Any
) -> None:
    """Run a test against a fresh engine; checks that nothing is left."""

    async def main() -> None:
        readers = ReaderLimits(max_unread_tokens=LIMIT, max_paused_seconds=max_paused_seconds)
        engine = make_engine(make_core(**core), readers)
        try:
            await body(engine)
            await until(lambda: engine.stats().num_free_pages == engine.stats().num_pages)
        finally:
            await engine.close()

    asyncio.run(main())


def unread(engine: AsyncEngine, request_id: str) -> int:
    """Tokens that a stream has not read."""
    mailbox = engine._mailboxes.get(request_id)
    return 0 if mailbox is None else mailbox._num_unread


async def read_at(rate: float, stream: Any) -> list[StreamOutput]:
    """Read a stream at so many tokens a second."""
    outputs = []
    async for output in stream:
        outputs.append(output)
        await asyncio.sleep(len(output.token_ids) / rate)
    return outputs


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_slow_reader_gets_every_token_in_the_end(overlaps: bool) -> None:
    async def body(engine: AsyncEngine) -> None:
        config = GenerationConfig(max_new_tokens=300, ignore_eos=True)
        outputs = []
        async for output in engine.stream("a", config, request_id="slow"):
            outputs.append(output)
            # As slow as can be: it reads on only when its request is paused, or has ended.
            await until(lambda: unread(engine, "slow") > LIMIT or not engine._mailboxes)
        tokens = [i for output in outputs for i in output.token_ids]
        assert tokens == count_up(97, 300, VOCAB_SIZE)
        assert outputs[-1].finish_reason == "length"
        assert LIMIT < max(len(output.token_ids) for output in outputs) <= LIMIT + SLACK

    run(body, 30.0, delay=0.001, overlaps=overlaps)


@tried_again_after_stalls
def test_p9_a_reader_at_one_token_a_second_stalls_nobody_and_is_aborted() -> None:
    async def body(engine: AsyncEngine) -> None:
        slow = asyncio.create_task(read_at(1.0, engine.stream("a", LONG, request_id="slow")))
        await until(lambda: unread(engine, "slow") > LIMIT)
        await until(lambda: engine.stats().num_running == 0)
        # Its place and its pages are free while it is paused.
        assert engine.stats().num_free_pages == engine.stats().num_pages
        runner = engine._link._loop._core._runner  # type: ignore[attr-defined]
        before = len(runner.batches)
        config = GenerationConfig(max_new_tokens=100, ignore_eos=True)
        others = [engine.stream("b", config) for _ in range(4)]
        await asyncio.gather(*(read_at(math.inf, stream) for stream in others))
        # As many steps as without it: a token a step for each, all four at once.
        assert 100 <= len(runner.batches) - before <= 110
        assert LIMIT < unread(engine, "slow") <= LIMIT + SLACK or "slow" not in engine._mailboxes
        await until(lambda: "slow" not in engine._mailboxes)  # aborted, and forgotten
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)

    run(body, 0.5, delay=0.001)


def test_what_there_was_can_still_be_read_after_the_abort() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.stream("a", LONG, request_id="slow")
        outputs = [await anext(stream)]
        await until(lambda: "slow" not in engine._mailboxes)
        outputs += [output async for output in stream]
        tokens = [i for output in outputs for i in output.token_ids]
        assert outputs[-1].finish_reason == "abort"
        assert tokens == count_up(97, len(tokens), VOCAB_SIZE)
        assert LIMIT < len(tokens) <= LIMIT + SLACK

    run(body, 0.1, delay=0.001)


def test_closing_a_paused_stream_frees_everything() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.stream("a", LONG)
        await anext(stream)
        await until(lambda: engine.stats().num_waiting == 1)
        await stream.aclose()
        await until(lambda: engine.stats().num_waiting == 0)
        await until(lambda: not engine._mailboxes)

    run(body, 30.0)


def test_an_engine_whose_requests_are_all_paused_blocks() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.stream("a", LONG)
        await anext(stream)
        await until(lambda: engine.stats().num_waiting == 1)
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.1
        await stream.aclose()

    run(body, 30.0)


class LongTexts(FakeRunner):
    """Every token writes a long text."""

    def dispatch(self, batch: Batch, moves: PageMoves) -> FakePending:
        """Answer every row with the same token."""
        super().dispatch(batch, moves)
        return FakePending([LONG_ID] * len(batch.sample_rows))


@asynccontextmanager
async def stopped_reader(max_paused_seconds: float) -> AsyncIterator[tuple[Service, Any]]:
    """A server, and what is left of an answer of which a client read the first message only."""
    core = make_core(max_model_len=20_000, num_pages=5_000)
    core._runner = LongTexts(VOCAB_SIZE)
    readers = ReaderLimits(max_unread_tokens=LIMIT, max_paused_seconds=max_paused_seconds)
    async with serving(core, readers) as service:
        # Fills up at 64 KiB; by default the client's side would take some megabytes first.
        small = (("grpc.http2.bdp_probe", 0),)
        async with grpc.aio.insecure_channel(service.server.address, small) as channel:
            stop = pb.StopOptions(max_new_tokens=15_000, ignore_eos=True)
            request = pb.GenerateRequest(text="a", stop=stop)
            messages = aiter(pb_grpc.GenerationServiceStub(channel).Generate(request))
            await anext(messages)
            yield service, messages


def test_over_grpc_a_client_that_stops_reading_is_aborted() -> None:
    async def main() -> None:
        async with stopped_reader(0.3) as (service, messages):
            await until(service.is_idle)  # paused, and aborted a little later
            last = [message async for message in messages][-1]
        assert last.finish_reason == pb.FINISH_REASON_ABORT
        assert 0 < last.usage.output_tokens < 1000

    asyncio.run(main())


def test_over_grpc_a_client_that_takes_nothing_for_long_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a drain would wait for it, and what it had sent would lie in memory for ever."""
    monkeypatch.setattr(patience, "SEND_SECONDS", 0.5)

    async def main() -> None:
        async with stopped_reader(0.2) as (service, messages):
            await until(service.is_idle)
            assert await service.server.drain("over", 5)  # it is not inside any more
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                async for _ in messages:
                    pass
            assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(main())


@pytest.mark.parametrize("bad", [{"max_unread_tokens": 0}, {"max_paused_seconds": 0.0}])
def test_limits_are_positive(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="both must be positive"):
        ReaderLimits(**bad)


@tried_again_after_stalls
def test_an_engine_that_waits_for_company_blocks_and_starts_in_time() -> None:
    async def body(engine: AsyncEngine) -> None:
        started, before = time.monotonic(), time.process_time()
        outputs = await read_at(math.inf, engine.stream("a", GenerationConfig(max_new_tokens=1)))
        assert outputs[-1].finish_reason == "length"
        assert 0.3 <= time.monotonic() - started < 1.0
        assert time.process_time() - before < 0.1

    run(body, 30.0, min_batch_size=2, max_wait=0.3)


def test_a_pause_that_came_too_late_does_not_touch_who_has_the_id_next() -> None:
    async def main() -> None:
        link = create_autospec(EngineLink, instance=True)
        request = make_request(make_core(), [1], LONG, request_id="same")
        limits = ReaderLimits(max_unread_tokens=LIMIT, max_paused_seconds=0.05)
        mailbox = Mailbox(request, link, limits)
        mailbox.put(StepOutput("same", (1,) * (LIMIT + 1), (0.0,) * (LIMIT + 1), None))
        assert link.method_calls == [call.pause("same")]
        mailbox.put(StepOutput("same", (1,), (0.0,), "length"))
        await asyncio.sleep(0.1)
        assert len(await mailbox.take()) == 2
        assert link.method_calls == [call.pause("same")]

    asyncio.run(main())


def test_a_stop_string_found_too_late_does_not_touch_who_has_the_id_next() -> None:
    async def body(engine: AsyncEngine) -> None:
        stops = GenerationConfig(max_new_tokens=8, n=2, stop="fg", ignore_eos=True)
        first = engine.stream("a", stops, request_id="x")
        await anext(first)
        await until(lambda: not engine._mailboxes)  # the engine has said everything
        whole = GenerationConfig(max_new_tokens=8, n=2, ignore_eos=True)
        second = engine.stream("a", whole, request_id="x")
        outputs = [await anext(second)]
        ends = [output.finish_reason async for output in first]
        assert ends.count("stop") == 2
        outputs += [output async for output in second]
        assert [o.finish_reason for o in outputs if o.finish_reason] == ["length", "length"]

    run(body, 30.0, delay=0.005)


def test_a_streaming_request_brings_the_size_of_its_own_buffer() -> None:
    async def body(engine: AsyncEngine) -> None:
        streaming = Streaming(sink=2, window=20, buffer=3 * LIMIT)
        config = GenerationConfig(max_new_tokens=400, ignore_eos=True, streaming=streaming)
        outputs = []
        async for output in engine.stream("a", config, request_id="slow"):
            outputs.append(output)
            await until(lambda: unread(engine, "slow") > 3 * LIMIT or not engine._mailboxes)
        tokens = [i for output in outputs for i in output.token_ids]
        assert tokens == count_up(97, 400, VOCAB_SIZE)
        assert 3 * LIMIT < max(len(output.token_ids) for output in outputs) <= 3 * LIMIT + SLACK

    run(body, 30.0, delay=0.001, streams=True)
