"""AsyncEngine over an engine in a process of its own: the same answers, and every way to die."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftjax.config import ReaderLimits
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.constraint import Constraint
from swiftjax.engine.link_messages import Abort, Order, Submit
from swiftjax.engine.process_link import ProcessLink
from swiftjax.engine.request import GenerationConfig, RequestOptions
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.engine.wire import FrameReader, Outbox, to_frame
from swiftjax.errors import (
    CheckpointError,
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    SwiftJaxError,
)
from swiftjax.serving.engine_watch import EngineWatch
from tests.fakes import make_request
from tests.serving.fake_engine import COMMAND, DEVICES
from tests.serving.harness import PATIENCE, make_core, until
from tests.stalls import tried_again_after_stalls

LONG = GenerationConfig(max_new_tokens=4000, ignore_eos=True)


async def start(
    readers: ReaderLimits | None = None, watch: EngineWatch | None = None, **job: Any
) -> tuple[AsyncEngine, ProcessLink]:
    """An engine process and what stands before it."""
    link, info = await ProcessLink.start(COMMAND, json.dumps(job).encode())
    tokenizer = Tokenizer(info.tokenizer_files)
    take = None if watch is None else watch.take
    return AsyncEngine(link, tokenizer, info.limits, readers, take), link


def run(
    body: Callable[[AsyncEngine, ProcessLink], Awaitable[None]],
    readers: ReaderLimits | None = None,
    watch: EngineWatch | None = None,
    **job: Any,
) -> None:
    """Run a test with an engine process; afterwards nothing may be left of it."""

    async def main() -> None:
        engine, link = await start(readers, watch, **job)
        try:
            await body(engine, link)
            if engine.is_alive:
                await until(lambda: engine.stats().num_free_pages == engine.stats().num_pages)
        finally:
            await engine.close()
        assert not engine.is_alive and not engine._mailboxes
        with pytest.raises(ProcessLookupError):
            os.kill(link.pid, 0)

    asyncio.run(main())


async def text_of(engine: AsyncEngine, prompt: str, **config: Any) -> str:
    """A whole answer."""
    outputs = engine.stream(prompt, GenerationConfig(**config))
    return "".join([output.text async for output in outputs])


@tried_again_after_stalls
def test_answers_options_and_measurements_cross() -> None:
    watch = EngineWatch()

    async def body(engine: AsyncEngine, link: ProcessLink) -> None:
        prompts = [chr(33 + i) for i in range(30)]
        texts = await asyncio.gather(*(text_of(engine, p, max_new_tokens=20) for p in prompts))
        assert texts == [bytes(range(34 + i, 54 + i)).decode() for i in range(30)]
        assert await text_of(engine, "a", stop="fg", max_new_tokens=50) == "bcde"
        regex = Constraint(kind="regex", text="b|c")
        assert await text_of(engine, "a", constraint=regex, max_new_tokens=1) == "b"
        within = RequestOptions(time_limit=0.1, client_id="me", cache_salt="s", priority=-3)
        outputs = [o async for o in engine.stream("a", LONG, options=within)]
        assert outputs[-1].finish_reason == "time_limit"
        with pytest.raises(DeadlineError):
            async for _ in engine.stream("a", LONG, timeout=0.05):
                pass
        await until(lambda: engine.stats().num_running == 0)
        samples = {s.name: s.value for m in watch.registry.collect() for s in m.samples}
        assert samples["swiftjax_request_queue_time_seconds_count"] == 34
        assert samples["swiftjax_prefix_cache_queries_total"] >= 30
        assert engine.devices() == DEVICES

    run(body, watch=watch, core={"delay": 0.001})


def test_refusals_and_aborts_cross() -> None:
    async def body(engine: AsyncEngine, link: ProcessLink) -> None:
        first = engine.stream("a", LONG, request_id="first")
        await anext(first)
        waiting = asyncio.create_task(anext(engine.stream("a", LONG, request_id="second")))  # type: ignore[arg-type]
        await until(lambda: engine.stats().num_waiting == 1)
        with pytest.raises(QueueFullError, match="1"):
            await anext(engine.stream("a", LONG))
        with pytest.raises(InvalidRequestError, match="raise max_queue_len"):
            await anext(engine.stream("a", GenerationConfig(n=2)))
        engine.abort("first")
        assert [o.finish_reason async for o in first][-1] == "abort"
        await asyncio.wait_for(waiting, PATIENCE)  # its turn
        engine.abort("second")
        await until(lambda: engine.stats().num_running == 0)

    run(body, core={"delay": 0.005, "max_num_seqs": 1, "max_queue_len": 1})


def test_an_abort_stays_behind_a_request_whose_grammar_is_being_compiled() -> None:
    async def body(engine: AsyncEngine, link: ProcessLink) -> None:
        slow = Constraint(kind="regex", text="(" + "|".join("abcdefgh" * 60) + "){1,200}")
        config = GenerationConfig(max_new_tokens=4000, constraint=slow)
        tasks = [asyncio.create_task(anext(engine.stream("a", config))) for _ in range(3)]  # type: ignore[arg-type]
        await until(lambda: bool(engine._mailboxes))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not engine._mailboxes)

    run(body, core={"delay": 0.001})


def test_a_bug_of_the_compiler_there_is_told_to_who_waits() -> None:
    async def body(engine: AsyncEngine, link: ProcessLink) -> None:
        for _ in range(2):
            with pytest.raises(SwiftJaxError, match="compiled: MemoryError"):
                regex = Constraint(kind="regex", text="b")
                await asyncio.wait_for(text_of(engine, "a", constraint=regex), PATIENCE)
        assert await text_of(engine, "a", max_new_tokens=1) == "b"

    run(body, no_grammars=True)


def test_a_slow_reader_is_paused_and_an_idle_engine_blocks() -> None:
    async def body(engine: AsyncEngine, link: ProcessLink) -> None:
        stream = engine.stream("a", LONG)
        await anext(stream)
        await until(lambda: engine.stats().num_waiting == 1)
        before = cpu_seconds(link.pid)
        await asyncio.sleep(0.3)
        assert cpu_seconds(link.pid) - before < 0.1
        num_tokens = len((await anext(stream)).token_ids)
        assert 64 < num_tokens < 1000
        await stream.aclose()

    run(body, ReaderLimits(max_unread_tokens=64))


def cpu_seconds(pid: int) -> float:
    """Time that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@tried_again_after_stalls
def test_p5_a_killed_engine_is_told_to_everybody_within_a_second() -> None:
    go_on = threading.Event()  # until then all threads of the loop are busy

    async def body(engine: AsyncEngine, link: ProcessLink) -> None:
        streams = [engine.stream("a", LONG) for _ in range(8)]
        for stream in streams[:4]:
            await anext(stream)
        reads = [asyncio.create_task(anext(stream)) for stream in streams[4:]]  # type: ignore[arg-type]
        await until(lambda: len(engine._mailboxes) == 8)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.get_running_loop().run_in_executor(None, go_on.wait, 5)
        os.kill(link.pid, signal.SIGKILL)
        started = time.monotonic()
        for stream in streams[:4]:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in stream:
                    pass
        await asyncio.gather(*reads, return_exceptions=True)
        await engine.wait_ended()
        assert time.monotonic() - started < 1.0
        go_on.set()
        await busy
        with pytest.raises(EngineDeadError):
            await anext(engine.stream("a", LONG))

    run(body, core={"delay": 0.005, "max_num_seqs": 4})


def test_an_engine_that_breaks_says_why() -> None:
    async def body(engine: AsyncEngine, link: ProcessLink) -> None:
        with pytest.raises(EngineDeadError, match="RuntimeError"):
            await text_of(engine, "a", max_new_tokens=100)
        await asyncio.wait_for(engine.wait_ended(), PATIENCE)

    run(body, die_after=5)


def test_what_goes_wrong_at_the_start_is_raised_here() -> None:
    async def main() -> None:
        with pytest.raises(CheckpointError, match="no such weights"):
            await start(refuse="no such weights")
        with pytest.raises(SwiftJaxError, match="status 1"):
            await start(core={"unknown": 1})
        kill = ["sh", "-c", "kill -9 $$"]
        with pytest.raises(SwiftJaxError, match="killed by SIGKILL"):
            await ProcessLink.start(kill, b"{}")

    asyncio.run(main())


def test_requests_and_everything_else_survive_the_wire() -> None:
    config = GenerationConfig(
        max_new_tokens=3, seed=2**64 - 1, logit_bias={5: 1.0}, bad_words_ids=((1, 2),), n=2,
        allowed_token_ids=(3, 4), stop_token_ids=(7,), temperature=0.5, logprobs=3, echo=True,
    )  # fmt: skip
    request = make_request(make_core(), [1, 2, 3], config, deadline=1.5, client_id="ä", priority=-1)
    assert FrameReader(Order).feed(to_frame(Submit(request))) == [Submit(request)]


@settings(max_examples=30)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=50)), st.integers(1, 40))
def test_frames_come_whole_however_they_are_cut(texts: list[str], size: int) -> None:
    data = b"".join(to_frame(Abort(text)) for text in texts)
    reader, got = FrameReader(Order), []
    for start_at in range(0, len(data), size):
        got += reader.feed(data[start_at : start_at + size])
    assert [order.request_id for order in got] == texts


def test_what_is_no_message_is_refused() -> None:
    for data in (b"\x00\x00\x00\x01\xc1", to_frame(msgspec.defstruct("Evil", ["x"])(1))):
        with pytest.raises(msgspec.DecodeError):
            FrameReader(Order).feed(data)


@tried_again_after_stalls
def test_an_outbox_holds_up_nobody_though_nothing_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox(ours)
        texts = [f"{i}" + "x" * 10_000 for i in range(200)]
        slowest = 0.0
        for text in texts:
            begun = time.monotonic()
            outbox.send(Abort(text))
            slowest = max(slowest, time.monotonic() - begun)
        assert slowest < 0.5
        reader, got = FrameReader(Order), []
        while len(got) < len(texts):
            got += [order.request_id for order in reader.feed(theirs.recv(2**16))]
        assert got == texts
        outbox.drain(1.0)
