"""Sessions of an AsyncEngine: their texts, who owns them, and how many there may be.

Texts live on the event loop, pages in the engine; an engine that dies takes its sessions along.
Made by `AsyncEngine`, which runs the turns.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from swiftjax.config import SessionLimits
from swiftjax.engine.async_session import AsyncSession, unknown_session
from swiftjax.engine.engine_link import EngineLink
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.link_messages import (
    CloseSession,
    LoadSession,
    SaveSession,
    SessionDone,
)
from swiftjax.engine.request import GenerationConfig, RequestOptions, StreamOutput
from swiftjax.engine.request_options import NO_OPTIONS
from swiftjax.engine.session import SessionText, new_session_id
from swiftjax.engine.session_asks import SessionAsks
from swiftjax.engine.session_room import SessionRoom
from swiftjax.engine.streaming import Streaming
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import SwiftJaxError

# How the engine answers a turn: with options, a request id and a timeout, as `AsyncEngine.stream`.
TurnStream = Callable[
    [AsyncSession, GenerationConfig, RequestOptions, str | None, float | None],
    AsyncGenerator[StreamOutput, None],
]


class AsyncSessions:
    """All open sessions of one engine."""

    def __init__(
        self,
        link: EngineLink,
        tokenizer: Tokenizer,
        engine_limits: EngineLimits,
        limits: SessionLimits,
        *,
        answer: TurnStream,
        check: Callable[[], None],
    ) -> None:
        """`check` raises when the engine has ended, or serves another event loop."""
        self._check = check
        self.link = link
        self.tokenizer = tokenizer
        self.answer = answer
        self._engine_limits = engine_limits
        self._room = SessionRoom(limits)
        self._open: dict[str, AsyncSession] = {}
        self._asks = SessionAsks(link)

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def open(
        self,
        *,
        streaming: Streaming | None = None,
        seed: int | None = None,
        options: RequestOptions = NO_OPTIONS,
        owner: str = "",
    ) -> AsyncSession:
        """Open one; raises QueueFullError if too many are, none of which was idle for long.

        An owner, unless it is nobody, has a share of all sessions (SessionLimits).
        """
        limits = self._engine_limits
        streaming = streaming or limits.default_streaming
        return self.add(SessionText(limits, streaming=streaming, seed=seed, options=options), owner)

    async def restore(self, path: str | Path, owner: str = "") -> AsyncSession:
        """Open one from a file, as `Engine.restore_session` does."""
        self._make_room(owner)
        session_id = new_session_id()
        try:
            done = await self.ask(LoadSession(session_id, str(path)))
            assert done.state is not None
            text = SessionText.of(self._engine_limits, session_id, done.state)
            return self.add(text, owner)
        except (SwiftJaxError, asyncio.CancelledError):  # whoever asked may be gone
            self.link.order_session(CloseSession(session_id))
            raise

    def find(self, session_id: str, owner: str = "") -> AsyncSession:
        """The session of an id; raises UnknownSessionError if it is closed or another owner's."""
        session = self._open.get(session_id)
        if session is None or session.owner != owner:
            raise unknown_session(session_id)
        return session

    def has(self, session: AsyncSession) -> bool:
        """Whether a session is open."""
        return self._open.get(session.session_id) is session

    def add(self, text: SessionText, owner: str) -> AsyncSession:
        """Open a session with a text."""
        self._check()
        self._make_room(owner)
        self.check_room(len(text.token_ids), owner)
        self._open[text.session_id] = session = AsyncSession(self, text, owner)
        return session

    def remove(self, session: AsyncSession) -> None:
        """Close a session, which may be closed already."""
        if self.has(session):
            del self._open[session.session_id]
            self.link.order_session(CloseSession(session.session_id))

    def forget_closed(self, session: AsyncSession) -> None:
        """A turn is over, whose pages nobody will ask for if its session was closed meanwhile."""
        if not self.has(session):
            self.link.order_session(CloseSession(session.session_id))

    async def ask(self, order: SaveSession | LoadSession) -> SessionDone:
        """Order something that is answered; raises what went wrong."""
        self._check()
        return await self._asks.ask(order)

    def take(self, done: SessionDone) -> None:
        """The engine answered."""
        self._asks.take(done)

    def fail(self, error: SwiftJaxError) -> None:
        """The engine has ended."""
        self._asks.fail(error)
        self._open.clear()

    def check_room(self, num_tokens: int, owner: str) -> None:
        """Raise QueueFullError where so many more tokens of an owner would take too much memory."""
        self._room.check_tokens(self._open.values(), num_tokens, owner)

    def _make_room(self, owner: str) -> None:
        if (oldest := self._room.find_place(self._open.values(), owner)) is not None:
            self.remove(oldest)
