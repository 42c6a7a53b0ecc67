"""Sessions of an AsyncEngine: their texts, who owns them, and how many there may be.

Texts live on the event loop, pages in the engine; an engine that dies takes its sessions along.
Made by `AsyncEngine`, which runs the turns.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from swiftjax.config import SessionLimits
from swiftjax.engine.chat_turns import Messages, read_content
from swiftjax.engine.checks import check_label
from swiftjax.engine.core import EngineLimits
from swiftjax.engine.engine_link import EngineLink
from swiftjax.engine.link_messages import (
    CloseSession,
    ForkSession,
    LoadSession,
    SaveSession,
    SessionDone,
)
from swiftjax.engine.request import GenerationConfig, Prompt, RequestOptions, StreamOutput
from swiftjax.engine.request_options import NO_OPTIONS
from swiftjax.engine.session import UNDER_WAY, SessionText, new_session_id
from swiftjax.engine.session_asks import SessionAsks
from swiftjax.engine.streaming import Streaming
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import (
    InvalidRequestError,
    QueueFullError,
    RepeatedTurnError,
    SwiftJaxError,
    UnknownSessionError,
)

MAX_TURN_IDS = 64  # of the last turns; who tries again does so soon


class AsyncSession:
    """One conversation, for one caller at a time: others are refused meanwhile."""

    def __init__(self, sessions: "AsyncSessions", text: SessionText, owner: str) -> None:
        self.owner = owner
        self.text = text
        self.last_used = time.monotonic()
        self._sessions = sessions
        self._turn_ids: deque[str] = deque(maxlen=MAX_TURN_IDS)
        self._is_claimed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def session_id(self) -> str:
        """The id by which it is found again."""
        return self.text.session_id

    @property
    def is_in_use(self) -> bool:
        """Whether somebody reads or changes it, or the engine works on it."""
        return self._is_claimed or self.text.is_busy

    def __len__(self) -> int:
        """Tokens of text so far."""
        return len(self.text.token_ids)

    async def append(self, content: Prompt | Messages, *, turn_id: str = "") -> None:
        """Add text, token ids or messages, as `Session.append` does; `turn_id` as in `stream`."""
        async with self._claim(turn_id):
            await self._append(content)
            self._turn_ids.append(turn_id)

    async def _append(self, content: Prompt | Messages) -> None:
        ids = await asyncio.to_thread(
            read_content, self._sessions.tokenizer, content, self.text.token_ids
        )
        self._sessions.check_room(len(ids))
        self.text.append(ids)

    async def stream(
        self,
        config: GenerationConfig | None = None,
        *,
        content: Prompt | Messages | None = None,
        options: RequestOptions | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        turn_id: str = "",
    ) -> AsyncGenerator[StreamOutput, None]:
        """Append `content`, go on with the text, and yield, as `AsyncEngine.stream` does.

        The answer becomes part of the text. One that is not read to its end does as far as it was
        made. A turn that was refused, or left before the engine had it, leaves the text as it was.
        `options` are this turn's, but for the cache salt, which is the session's. Raises
        RepeatedTurnError where a turn of the same `turn_id` is under way or in the text.
        """
        async with self._claim(turn_id):
            length, has_begun = len(self), False
            self._turn_ids.append(turn_id)
            try:
                if content is not None:
                    await self._append(content)
                config = self.text.configure(config or GenerationConfig())
                chosen = self.text.options if options is None else options
                answers = self._sessions.answer(self, config, chosen, request_id, timeout)
                async with aclosing(answers):
                    async for output in answers:
                        has_begun = True
                        yield output
            except (SwiftJaxError, asyncio.CancelledError):
                if not has_begun and not self.text.is_busy:
                    del self.text.token_ids[length:]
                    self._turn_ids.pop()
                raise

    async def fork(self) -> "AsyncSession":
        """Open another session with the same text, which shares all pages so far."""
        async with self._claim():
            fork = self._sessions.add(self.text.fork(), self.owner)
            self._sessions.link.order_session(ForkSession(self.session_id, fork.session_id))
            return fork

    async def save(self, path: str | Path) -> None:
        """Write everything to a file of the engine's machine, as `Session.save` does."""
        async with self._claim():
            await self._sessions.ask(SaveSession(self.session_id, str(path), self.text.state()))

    def close(self) -> None:
        """Give up the pages; a turn that is under way goes on, for nothing."""
        self._sessions.remove(self)

    def begin(self) -> None:
        """A turn was submitted."""
        self._is_idle.clear()

    def end(self) -> None:
        """The turn is over."""
        self.last_used = time.monotonic()
        self._is_idle.set()
        self._sessions.forget_closed(self)

    @asynccontextmanager
    async def _claim(self, turn_id: str = "") -> AsyncIterator[None]:
        """Be the one who reads or changes it, once the engine has said its last word on a turn."""
        check_label("turn_id", turn_id)
        if turn_id and turn_id in self._turn_ids:
            raise RepeatedTurnError(
                f"a turn {turn_id!r:.80} is under way or in the session's text: what it adds is "
                "added once, so go on with a turn of another turn_id"
            )
        if self._is_claimed:
            raise InvalidRequestError(UNDER_WAY)
        self._is_claimed = True
        self.last_used = time.monotonic()
        try:
            await self._is_idle.wait()
            if not self._sessions.has(self):
                raise _unknown(self.session_id)
            yield
        finally:
            self._is_claimed = False


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
        self._limits = limits
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
        """Open one; raises QueueFullError if too many are, none of which was idle for long."""
        limits = self._engine_limits
        streaming = streaming or limits.default_streaming
        return self.add(SessionText(limits, streaming=streaming, seed=seed, options=options), owner)

    async def restore(self, path: str | Path, owner: str = "") -> AsyncSession:
        """Open one from a file, as `Engine.restore_session` does."""
        self._make_room()
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
            raise _unknown(session_id)
        return session

    def has(self, session: AsyncSession) -> bool:
        """Whether a session is open."""
        return self._open.get(session.session_id) is session

    def add(self, text: SessionText, owner: str) -> AsyncSession:
        """Open a session with a text."""
        self._check()
        self._make_room()
        self.check_room(len(text.token_ids))
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

    def check_room(self, num_tokens: int) -> None:
        """Raise QueueFullError where so many more tokens would take too much memory."""
        total = sum(map(len, self._open.values())) + num_tokens
        if total > self._limits.max_tokens:
            raise QueueFullError(
                f"all open sessions would have {total} tokens; at most {self._limits.max_tokens} "
                "are kept (max_tokens): close some, or append less"
            )

    def _make_room(self) -> None:
        if len(self._open) < self._limits.max_open:
            return
        idle = [s for s in self._open.values() if not s.is_in_use]
        oldest = min(idle, key=lambda s: s.last_used, default=None)
        seconds = self._limits.idle_seconds
        if oldest is None or time.monotonic() - oldest.last_used < seconds:
            raise QueueFullError(
                f"{len(self._open)} sessions are open (max_open) and none was idle for "
                f"{seconds:g} s: close one, or try again later"
            )
        self.remove(oldest)


def _unknown(session_id: str) -> UnknownSessionError:
    text = f"no session {session_id!r:.80} is open: it was closed, or never was"
    return UnknownSessionError(text)
