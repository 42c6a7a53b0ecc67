"""AsyncEngine over an engine thread, without a transport."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from swiftjax.engine import mailboxes
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.engine_link import ThreadLink
from swiftjax.engine.link_messages import News
from swiftjax.engine.request import GenerationConfig, RequestOptions, StreamOutput
from swiftjax.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    KeyLimitError,
    QueueFullError,
)
from tests.serving.harness import PATIENCE, byte_tokenizer, make_core, make_engine, until
from tests.stalls import tried_again_after_stalls

LONG = GenerationConfig(max_new_tokens=4000, ignore_eos=True)


def within(seconds: float) -> RequestOptions:
    return RequestOptions(time_limit=seconds)


def run(body: Callable[[AsyncEngine], Awaitable[None]], **core: Any) -> None:
    """Run a test with a fresh engine; closes it and checks that nothing is left."""

    async def main() -> None:
        fake = make_core(**core)
        engine = make_engine(fake)
        try:
            await body(engine)
            if engine.is_alive:
                await until(lambda: engine.stats().num_free_pages == engine.stats().num_pages)
        finally:
            await engine.close()
        assert not engine._link._thread.is_alive()  # type: ignore[attr-defined]

    asyncio.run(main())


async def collect(engine: AsyncEngine, prompt: str, count: int) -> list[StreamOutput]:
    """All outputs of one request."""
    config = GenerationConfig(max_new_tokens=count)
    return [output async for output in engine.stream(prompt, config)]


def test_streams_run_together_and_each_gets_its_own_answer() -> None:
    async def body(engine: AsyncEngine) -> None:
        answers = await asyncio.gather(*(collect(engine, chr(33 + i), 20) for i in range(30)))
        for index, outputs in enumerate(answers):
            expected = [34 + index + i for i in range(20)]
            assert [i for o in outputs for i in o.token_ids] == expected
            assert "".join(o.text for o in outputs) == bytes(expected).decode()
            assert [len(o.logprobs) for o in outputs] == [len(o.token_ids) for o in outputs]
            assert outputs[-1].finish_reason == "length"
            assert (outputs[-1].num_prompt_tokens, outputs[-1].num_output_tokens) == (1, 20)

    run(body)


def test_idle_engine_blocks_and_takes_no_steps() -> None:
    async def body(engine: AsyncEngine) -> None:
        await collect(engine, "a", 3)
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.1

    run(body)


def test_slow_reader_gets_everything_since_its_last_read_at_once() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.stream("a", GenerationConfig(max_new_tokens=50))
        first = await anext(stream)
        await until(lambda: not engine._mailboxes)  # the engine has said everything
        second = await anext(stream)
        assert first.token_ids + second.token_ids == tuple(range(98, 148))
        assert second.finish_reason == "length"
        await stream.aclose()

    run(body, delay=0.001)


def test_tokens_after_a_stop_string_are_dropped_even_when_they_came_with_it() -> None:
    async def body(engine: AsyncEngine) -> None:
        config = GenerationConfig(max_new_tokens=50, stop="fg", ignore_eos=True)
        stream = engine.stream("a", config)
        outputs = [await anext(stream)]
        await until(lambda: not engine._mailboxes)  # the engine has said everything
        outputs += [output async for output in stream]
        assert "".join(o.text for o in outputs) == "bcde"
        assert outputs[-1].matched_stop == "fg"
        assert outputs[-1].num_output_tokens == len("bcdefg")

    run(body, delay=0.001)


def test_b050_closing_the_stream_aborts() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.stream("a", LONG)
        await anext(stream)
        assert engine.stats().num_running == 1
        await stream.aclose()
        await until(lambda: engine.stats().num_running == 0)

    run(body, delay=0.005)


def test_abort_by_id_ends_the_stream_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.stream("a", LONG, request_id="mine")
        await anext(stream)
        with monkeypatch.context() as patch:
            # Nor does the engine hear of it, however many there are.
            patch.setattr(engine._link, "abort", lambda *_: pytest.fail("it is not known"))
            engine.abort("unknown")
        engine.abort("mine")
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason == "abort"
        # The id is free again.
        again = engine.stream("a", GenerationConfig(max_new_tokens=1), request_id="mine")
        assert [o.text async for o in again] == ["b"]

    run(body, delay=0.005)


@pytest.mark.parametrize("queued", [False, True])
@tried_again_after_stalls
def test_timeout_raises_and_time_limit_ends(queued: bool) -> None:
    async def body(engine: AsyncEngine) -> None:
        ahead = engine.stream("a", LONG)
        await anext(ahead)
        with pytest.raises(DeadlineError, match=r"0\.1 s"):
            async for _ in engine.stream("a", LONG, timeout=0.1, options=within(0.5)):
                pass
        outputs = [o async for o in engine.stream("a", LONG, timeout=5.0, options=within(0.1))]
        assert outputs[-1].finish_reason == "time_limit"
        assert (outputs[-1].num_output_tokens == 0) is queued
        await ahead.aclose()

    run(body, delay=0.005, max_num_seqs=1 if queued else 4)


@tried_again_after_stalls
def test_deadline_is_kept_while_a_step_takes_long() -> None:
    async def body(engine: AsyncEngine) -> None:
        started = time.monotonic()
        with pytest.raises(DeadlineError):
            async for _ in engine.stream("a", LONG, timeout=0.1):
                pass
        assert time.monotonic() - started < 0.5

    run(body, delay=1.0)


def test_refusals_come_back_to_the_caller() -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            await anext(engine.stream([10**6], LONG))
        with pytest.raises(InvalidRequestError, match="lone surrogate"):
            await anext(engine.stream("\ud83d", LONG))
        streams = [engine.stream("a", LONG, request_id=str(i)) for i in range(3)]
        for stream in streams[:1]:
            await anext(stream)
        waiting = asyncio.create_task(anext(streams[1]))  # type: ignore[arg-type]
        await until(lambda: engine.stats().num_waiting == 1)
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(engine.stream("a", LONG, request_id="0"))
        with pytest.raises(QueueFullError):
            await anext(streams[2])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

    run(body, delay=0.005, max_num_seqs=1, max_queue_len=1)


def test_close_ends_open_streams() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.stream("a", LONG)
        await anext(stream)
        ended = asyncio.create_task(engine.wait_ended())
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            async for _ in stream:
                pass
        await asyncio.wait_for(ended, PATIENCE)
        with pytest.raises(EngineDeadError):
            await anext(engine.stream("a", LONG))
        await engine.close()

    run(body, delay=0.005)


def test_engine_thread_that_dies_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: AsyncEngine) -> None:
        streams = [engine.stream("a", LONG) for _ in range(4)]
        for stream in streams:
            await anext(stream)

        def fail(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(engine._link._loop._core, "step", fail)  # type: ignore[attr-defined]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="MemoryError"):
                async for _ in stream:
                    pass
        assert not engine.is_alive
        await asyncio.wait_for(engine.wait_ended(), PATIENCE)

    run(body, delay=0.005)


def test_one_event_loop_at_a_time_and_another_once_it_is_closed() -> None:
    core = make_core()
    engine = make_engine(core)

    async def ask() -> str:
        return "".join(o.text for o in await collect(engine, "a", 3))

    assert asyncio.run(ask()) == "bcd"
    assert asyncio.run(ask()) == "bcd"

    async def from_another_thread() -> None:
        await ask()
        with pytest.raises(InvalidRequestError, match="one event loop"):
            await asyncio.to_thread(asyncio.run, ask())
        await engine.close()

    asyncio.run(from_another_thread())


def test_loop_that_closes_with_open_streams_leaves_the_engine_running() -> None:
    core = make_core(delay=0.002)
    engine = make_engine(core)

    async def leave() -> None:
        await anext(engine.stream("a", LONG))

    async def ask() -> str:
        await until(lambda: engine.stats().num_running == 0)
        text = "".join(o.text for o in await collect(engine, "a", 3))
        await engine.close()
        return text

    asyncio.run(leave())
    assert asyncio.run(ask()) == "bcd"


def test_thread_link_reports_one_batch_of_events_per_step() -> None:
    async def main() -> None:
        batches: list[int] = []
        link = ThreadLink(make_core(delay=0.002))
        engine = AsyncEngine(link, byte_tokenizer(), link._loop._core.limits)
        receive = engine._receive

        def counted(news: News) -> None:
            batches.append(len(news.outputs))
            receive(news)

        engine._receive = counted  # type: ignore[method-assign]
        await asyncio.gather(*(collect(engine, "a", 30) for _ in range(4)))
        # 120 tokens in little more than 30 steps, each told in one call.
        told = [count for count in batches if count]
        assert sum(told) == 120 and len(told) < 60
        await engine.close()

    asyncio.run(main())


def test_closing_at_any_moment_leaves_no_choice_though_some_wait() -> None:
    async def body(engine: AsyncEngine) -> None:
        rng = random.Random(5)
        config = GenerationConfig(max_new_tokens=4000, ignore_eos=True, n=9)

        async def open_and_close() -> None:
            async with aclosing(engine.stream("a", config, timeout=1e12)) as stream:
                for _ in range(rng.randrange(3)):
                    await anext(stream)
                await asyncio.sleep(rng.random() * 0.01)

        for _ in range(10):
            await asyncio.gather(*(open_and_close() for _ in range(3)))
        await until(lambda: not engine._mailboxes)  # the engine has heard and said everything
        await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 0)

    run(body, delay=0.001, max_num_seqs=4)


def test_prompts_of_all_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "MAX_PROMPT_TOKENS", 250)
    monkeypatch.setattr(mailboxes, "SHORT_PROMPT", 10)

    async def body(engine: AsyncEngine) -> None:
        first = engine.stream("a" * 200, GenerationConfig(max_new_tokens=400))
        await anext(first)
        with pytest.raises(QueueFullError, match="would have 260 tokens; 250 are taken"):
            await collect(engine, "a" * 60, 5)
        for client_id in ("k", "k/b"):
            other = engine.stream("a" * 126, LONG, options=RequestOptions(client_id=client_id))
            with pytest.raises(KeyLimitError, match="would have 126 tokens; 125 are taken"):
                await anext(other)
        await collect(engine, "a", 5)  # a short one is never many
        await first.aclose()
        await until(lambda: engine.stats().num_running == 0)
        await collect(engine, "a" * 60, 5)

    run(body)
