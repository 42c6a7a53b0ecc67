"""Callers that do everything to sessions at once and leave at any moment: nothing stays behind."""

import asyncio
import random
from itertools import pairwise
from pathlib import Path

import pytest

from swiftjax.config import ReaderLimits, SessionLimits
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.async_session import AsyncSession
from swiftjax.engine.request import GenerationConfig, RequestOptions
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import SwiftJaxError
from tests.serving.harness import PATIENCE, make_core, make_engine, until

THREE = GenerationConfig(max_new_tokens=3, ignore_eos=True)


class Chaos:
    """Does things at random to a few sessions; text is appended as "a" and "b" only."""

    def __init__(self, engine: AsyncEngine, folder: Path, rng: random.Random) -> None:
        self.engine, self.folder, self.rng = engine, folder, rng
        self.sessions: list[AsyncSession] = []
        self.num_done = self.num_cancelled = self.num_refused = 0

    async def work(self, count: int) -> None:
        """So many things, of which a third are cut off somewhere."""
        for _ in range(count):
            task = asyncio.create_task(self.act())
            try:
                if self.rng.random() < 0.35:
                    await asyncio.sleep(self.rng.random() * self.rng.choice([0.001, 0.01]))
                    task.cancel()
                await task
                self.num_done += 1
            except asyncio.CancelledError:
                self.num_cancelled += 1
            except SwiftJaxError:
                self.num_refused += 1

    async def act(self) -> None:
        """One thing."""
        rng, sessions = self.rng, self.sessions
        if not sessions or rng.random() < 0.1:
            streaming = rng.choice([None, Streaming(sink=2, window=20)])
            sessions.append(self.engine.sessions.open(streaming=streaming))
        session, file = rng.choice(sessions), self.folder / str(rng.randrange(3))
        match rng.randrange(9):
            case 0:
                await session.append("a" * rng.randrange(1, 30))
            case 1:
                sessions.append(await session.fork())
            case 2:
                await session.save(file)
            case 3:
                sessions.append(await self.engine.sessions.restore(file))
            case 4:
                session.close()
                sessions.remove(session)
            case _:
                await self.turn(session)

    async def turn(self, session: AsyncSession) -> None:
        """One that is read to its end, or in part, or slowly, or not at all."""
        rng = self.rng
        config = GenerationConfig(
            max_new_tokens=rng.randrange(1, 40),
            ignore_eos=True,
            stop=rng.choice([(), ("g",), ("fg", "h")]),
        )
        stream = session.stream(
            config,
            content=rng.choice([None, "a" * rng.randrange(1, 50), [97, 98]]),
            timeout=rng.choice([None, None, 0.001, 0.0, 0.02]),
            turn_id=rng.choice(["", "x"]),
            options=RequestOptions(time_limit=rng.choice([None, None, 1e-6, 0.01])),
        )
        try:
            for _ in range(rng.choice([0, 1, 3, 1000])):
                await anext(stream)
                if rng.random() < 0.1:
                    await asyncio.sleep(0.06)
        except StopAsyncIteration:
            pass
        finally:
            await stream.aclose()


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_p2_sessions_that_are_left_at_any_moment_can_be_used_again(
    tmp_path: Path, overlaps: bool
) -> None:
    async def main() -> None:
        core = make_core(
            streams=True, delay=0.0005, num_pages=200, max_num_seqs=3, max_queue_len=4,
            overlaps=overlaps,
        )  # fmt: skip
        readers = ReaderLimits(max_unread_tokens=30, max_paused_seconds=0.05)
        limits = SessionLimits(max_open=40, idle_seconds=0.02)
        engine = make_engine(core, readers=readers, sessions=limits)
        chaos = Chaos(engine, tmp_path, random.Random(overlaps))
        await asyncio.gather(*(chaos.work(40) for _ in range(8)))
        assert min(chaos.num_done, chaos.num_cancelled, chaos.num_refused) > 10
        for session in list(engine.sessions._open.values()):
            await asyncio.wait_for(session.append("b"), PATIENCE)
            assert "".join([o.text async for o in session.stream(THREE)]) == "cde"
            ids = session.text.token_ids
            assert all(token in b"ab" or token == last + 1 for last, token in pairwise(ids))
            session.close()
        await until(lambda: engine.stats().num_free_pages == engine.stats().num_pages)
        await engine.close()
        assert not core.has_work and not core.scheduler.kept._entries
        core.scheduler.check_integrity()

    asyncio.run(main())
