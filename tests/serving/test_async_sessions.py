"""Sessions of an AsyncEngine, its engine on a thread or in a process: texts, turns and owners."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from swiftjax.config import SessionLimits
from swiftjax.engine import session_orders
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.async_session import AsyncSession
from swiftjax.engine.constraint import Constraint
from swiftjax.engine.grammar import Grammar
from swiftjax.engine.link_messages import CloseSession
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.session_pages import SavedPages, SessionPages
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import (
    EngineDeadError,
    InvalidRequestError,
    KeyLimitError,
    NotFoundError,
    QueueFullError,
    SwiftJaxError,
)
from tests.serving.harness import make_core, make_engine, until
from tests.serving.test_process_link import start

Body = Callable[[AsyncEngine], Awaitable[None]]
FIVE = GenerationConfig(max_new_tokens=5)
LONG = GenerationConfig(max_new_tokens=4000, ignore_eos=True)


def run(body: Body, *, apart: bool = False, **limits: Any) -> None:
    """Run a test; afterwards all pages are free."""

    core = make_core(streams=True, delay=0.001)

    async def main() -> None:
        if apart:
            engine, _ = await start()
        else:
            engine = make_engine(core, sessions=SessionLimits(**limits))
        try:
            await body(engine)
            for session in list(engine.sessions._open.values()):
                session.close()
            if engine.is_alive:
                await until(lambda: engine.stats().num_free_pages == engine.stats().num_pages)
        finally:
            await engine.close()
        if not apart:
            assert not core.scheduler.kept._entries

    asyncio.run(main())


async def answer(session: AsyncSession, config: GenerationConfig = FIVE) -> str:
    return "".join([output.text async for output in session.stream(config)])


def text_of(session: AsyncSession) -> str:
    return bytes(session.text.token_ids).decode()


@pytest.mark.parametrize("apart", [False, True], ids=["thread", "process"])
def test_turns_forks_and_files(apart: bool, tmp_path: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        session = engine.sessions.open()
        await session.append("a")
        assert await answer(session) == "bcdef"
        await session.append("A")
        fork = await session.fork()
        outputs = [output async for output in session.stream(FIVE)]
        assert outputs[-1].num_cached_tokens == 5 and outputs[-1].num_prompt_tokens == 7
        await fork.append("0")
        assert await answer(fork) == "12345"
        assert (text_of(session), text_of(fork)) == ("abcdefABCDEF", "abcdefA012345")
        await session.save(tmp_path / "talk")
        session.close()
        with pytest.raises(NotFoundError, match="no session"):
            await session.append("x")
        other = await engine.sessions.restore(tmp_path / "talk")
        outputs = [output async for output in other.stream(FIVE)]
        assert text_of(other) == "abcdefABCDEFGHIJK"
        assert outputs[-1].num_cached_tokens == 11
        with pytest.raises(InvalidRequestError, match="cannot read"):
            await engine.sessions.restore(tmp_path / "none")
        with pytest.raises(InvalidRequestError, match="cannot write"):
            await other.save(tmp_path / "no" / "folder")
        await other.append([{"role": "user", "content": "q"}])
        assert text_of(other).endswith("GHIJK;user:q;")

    run(body, apart=apart)


def test_an_answer_that_nobody_reads_to_its_end_stays_as_far_as_it_was_made() -> None:
    async def body(engine: AsyncEngine) -> None:
        session = engine.sessions.open(streaming=Streaming(sink=2, window=20))
        await session.append("a")
        stream = session.stream(LONG)
        async with aclosing(stream):
            await anext(stream)
            with pytest.raises(InvalidRequestError, match="under way"):
                await session.append("x")
            with pytest.raises(InvalidRequestError, match="under way"):
                await answer(session)
        length = len(session)
        await session.append([97])  # waits for the engine's last word
        text = session.text.token_ids
        assert 2 <= length <= len(text) - 1
        assert text[:-1] == [(97 + i) % 258 for i in range(len(text) - 1)]
        assert await answer(session) == "bcdef"

    run(body)


def test_of_two_turns_at_once_one_is_refused_and_leaves_no_trace() -> None:
    async def body(engine: AsyncEngine) -> None:
        session = engine.sessions.open()

        async def turn(text: str) -> str:
            outputs = session.stream(FIVE, content=text)
            return "".join([output.text async for output in outputs])

        results = await asyncio.gather(*map(turn, "aBk"), return_exceptions=True)
        assert results[0] == "bcdef"
        assert all(isinstance(result, InvalidRequestError) for result in results[1:])
        assert text_of(session) == "abcdef"

    run(body)


def test_what_was_made_behind_a_stop_string_is_no_part_of_the_text() -> None:
    async def body(engine: AsyncEngine) -> None:
        session = engine.sessions.open(streaming=Streaming(sink=2, window=20))
        await session.append("a")
        config = GenerationConfig(max_new_tokens=200, stop="mn")
        assert await answer(session, config) == "bcdefghijkl"
        await session.append("!")
        assert text_of(session) == "abcdefghijklmn!"

    run(body)


def test_a_closed_session_gives_its_pages_back_though_a_turn_is_read() -> None:
    async def body(engine: AsyncEngine) -> None:
        session = engine.sessions.open()
        await session.append("a")
        stream = session.stream(GenerationConfig(max_new_tokens=20))
        texts = [(await anext(stream)).text]
        session.close()
        texts += [output.text async for output in stream]
        assert "".join(texts) == "bcdefghijklmnopqrstu"

    run(body)


def test_sessions_are_bounded_and_belong_to_their_owners() -> None:
    async def body(engine: AsyncEngine) -> None:
        sessions = [engine.sessions.open(owner=owner) for owner in ("me", "them")]
        with pytest.raises(QueueFullError, match="max_open"):
            engine.sessions.open()
        assert engine.sessions.find(sessions[0].session_id, "me") is sessions[0]
        with pytest.raises(NotFoundError):
            engine.sessions.find(sessions[0].session_id, "you")
        sessions[0].last_used -= 61
        engine.sessions.open()
        with pytest.raises(NotFoundError):
            engine.sessions.find(sessions[0].session_id, "me")

    run(body, max_open=2, idle_seconds=60.0)


def test_one_owner_cannot_have_all_sessions_nor_all_their_tokens() -> None:
    async def body(engine: AsyncEngine) -> None:
        mine = [engine.sessions.open(owner="me") for _ in range(2)]
        with pytest.raises(KeyLimitError, match="may have 2 open sessions"):
            engine.sessions.open(owner="me")
        theirs = engine.sessions.open(owner="they")
        await mine[0].append("x" * 30)
        with pytest.raises(KeyLimitError, match="51 tokens; at most 50"):
            await mine[1].append("x" * 21)
        await theirs.append("x" * 50)
        # Its own oldest makes room for it, not somebody else's.
        mine[1].last_used -= 61
        theirs.last_used -= 70
        new = engine.sessions.open(owner="me")
        assert [engine.sessions.has(s) for s in (*mine, theirs, new)] == [True, False, True, True]

    run(body, max_open=4, max_tokens=100, idle_seconds=60.0)


def test_the_texts_of_all_sessions_are_bounded() -> None:
    async def body(engine: AsyncEngine) -> None:
        sessions = [engine.sessions.open() for _ in range(2)]
        await sessions[0].append("x" * 60)
        with pytest.raises(QueueFullError, match=r"101 tokens.*max_tokens"):
            await sessions[1].append("x" * 41)
        with pytest.raises(QueueFullError, match="120 tokens"):
            await sessions[0].fork()
        assert [len(session) for session in sessions] == [60, 0]

    run(body, max_tokens=100)


def test_sessions_end_with_their_engine() -> None:
    async def body(engine: AsyncEngine) -> None:
        session = engine.sessions.open()
        await session.append("a")
        await engine.close()
        with pytest.raises(EngineDeadError):
            engine.sessions.open()
        with pytest.raises(NotFoundError):
            await session.append("x")

    run(body)


def test_a_turn_left_before_the_engine_has_it_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(engine: AsyncEngine) -> None:
        session = engine.sessions.open()
        await session.append("a")
        go_on, compile = threading.Event(), engine._grammars.compile

        def slowly(constraint: Constraint) -> Grammar:
            go_on.wait(5)
            return compile(constraint)

        monkeypatch.setattr(engine._grammars, "compile", slowly)
        config = GenerationConfig(constraint=Constraint(kind="regex", text="x"))
        turn = session.stream(config, content="bc")
        reading = asyncio.create_task(anext(turn))  # type: ignore[arg-type]
        await until(lambda: len(session) == 3)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        go_on.set()
        assert text_of(session) == "a"
        assert await answer(session) == "bcdef"

    run(body)


def test_a_restore_that_nobody_waits_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: AsyncEngine) -> None:
        orders: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(engine.sessions.link, "order_session", orders.append)
            task = asyncio.create_task(engine.sessions.restore("talk"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        loaded, closed = orders
        assert closed == CloseSession(loaded.session)

    run(body)


def test_files_are_written_and_read_beside_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk holds up nobody but who waits for it."""
    may_go_on = threading.Event()

    def slowly(do: Callable[..., object]) -> Callable[..., object]:
        def wait(*args: object) -> object:
            assert may_go_on.wait(10)
            return do(*args)

        return wait

    for name in ("write_session", "read_session"):
        monkeypatch.setattr(session_orders, name, slowly(getattr(session_orders, name)))

    async def body(engine: AsyncEngine) -> None:
        session, other = (engine.sessions.open() for _ in range(2))
        for one in (session, other):
            await one.append("a")
            assert await answer(one, FIVE) == "bcdef"
        path = tmp_path / "talk"
        saving = asyncio.create_task(session.save(path))
        assert await answer(other, FIVE) == "ghijk"
        may_go_on.set()
        await saving
        may_go_on.clear()
        restoring = asyncio.create_task(engine.sessions.restore(path))
        left = asyncio.create_task(engine.sessions.restore(path))
        assert await answer(other, FIVE) == "lmnop"
        left.cancel()  # whose pages nobody would ever give back
        await asyncio.sleep(0.01)
        may_go_on.set()
        restored = await restoring
        assert text_of(restored) == "abcdef" and await answer(restored, FIVE) == "ghijk"
        assert len(engine.sessions) == 3

    run(body)


def test_pages_are_copied_for_one_file_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a key could have all its sessions saved at once, and memory would not do."""
    num_held = most_held = 0
    save, write = SessionPages.save, session_orders.write_session

    def counted_save(*args: Any) -> SavedPages:
        nonlocal num_held, most_held
        num_held += 1
        most_held = max(most_held, num_held)
        return save(*args)

    def counted_write(*args: Any) -> None:
        nonlocal num_held
        write(*args)
        num_held -= 1

    monkeypatch.setattr(SessionPages, "save", counted_save)
    monkeypatch.setattr(session_orders, "write_session", counted_write)

    async def body(engine: AsyncEngine) -> None:
        sessions = [engine.sessions.open() for _ in range(12)]
        for session in sessions:
            await session.append("a")
        saving = [s.save(tmp_path / str(i)) for i, s in enumerate(sessions)]
        saving.append(engine.sessions.open().save(tmp_path / "none" / "x"))
        *done, refused = await asyncio.gather(*saving, return_exceptions=True)
        assert done == [None] * 12 and isinstance(refused, InvalidRequestError)
        assert most_held == 1
        assert len(await engine.sessions.restore(tmp_path / "11")) == 1

    run(body)


def test_a_file_that_is_a_bug_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    async def body(engine: AsyncEngine) -> None:
        session = engine.sessions.open()
        await session.append("a")
        monkeypatch.setattr(session_orders, "write_session", fail)
        with pytest.raises(SwiftJaxError, match="MemoryError"):
            await session.save(tmp_path / "talk")
        monkeypatch.undo()
        await session.save(tmp_path / "talk")
        monkeypatch.setattr(session_orders, "keep_session", fail)
        with pytest.raises(SwiftJaxError, match="MemoryError"):
            await engine.sessions.restore(tmp_path / "talk")
        assert await answer(session, FIVE) == "bcdef"

    run(body)
