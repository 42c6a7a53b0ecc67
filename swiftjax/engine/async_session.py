"""One session of an AsyncEngine: its turns, one at a time, and what else is done to it.

Made and found by `AsyncSessions`, which knows all of them; the engine runs the turns.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swiftjax.engine.chat_turns import Messages, read_content
from swiftjax.engine.checks import check_label
from swiftjax.engine.link_messages import ForkSession, SaveSession
from swiftjax.engine.request import GenerationConfig, Prompt, RequestOptions, StreamOutput
from swiftjax.engine.session import UNDER_WAY, SessionText
from swiftjax.engine.text_threads import count_chars, in_thread
from swiftjax.errors import (
    InvalidRequestError,
    RepeatedTurnError,
    SwiftJaxError,
    UnknownSessionError,
)

if TYPE_CHECKING:
    from swiftjax.engine.async_sessions import AsyncSessions

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
        read = partial(read_content, self._sessions.tokenizer, content, self.text.token_ids)
        ids = await in_thread(count_chars(content), read)
        self._sessions.check_room(len(ids), self.owner)
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
        arrival = time.monotonic()
        async with self._claim(turn_id):
            length, has_begun = len(self), False
            self._turn_ids.append(turn_id)
            try:
                if content is not None:
                    await self._append(content)
                config = self.text.configure(config or GenerationConfig())
                chosen = self.text.options if options is None else options
                chosen = chosen.with_time_left(time.monotonic() - arrival)
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
                raise unknown_session(self.session_id)
            yield
        finally:
            self._is_claimed = False


def unknown_session(session_id: str) -> UnknownSessionError:
    """The error for an id that is no open session of the caller."""
    text = f"no session {session_id!r:.80} is open: it was closed, or never was"
    return UnknownSessionError(text)
