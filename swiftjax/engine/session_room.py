"""How many sessions there may be and how much text they may have: in all, and of one owner.

Only says so; `AsyncSessions` opens and closes them.
"""

import time
from collections.abc import Iterable

from swiftjax.config import SessionLimits
from swiftjax.engine.async_session import AsyncSession
from swiftjax.errors import KeyLimitError, QueueFullError


class SessionRoom:
    """The limits of one engine. An owner without a name has no limits of its own."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._own_sessions = max(1, int(limits.max_open * limits.owner_share))
        self._own_tokens = int(limits.max_tokens * limits.owner_share)

    def check_tokens(self, sessions: Iterable[AsyncSession], num_tokens: int, owner: str) -> None:
        """Raise QueueFullError, or KeyLimitError, where so many more tokens would be too many."""
        total = own = num_tokens
        for session in sessions:
            total += len(session)
            own += len(session) if session.owner == owner else 0
        if owner and own > self._own_tokens:
            raise KeyLimitError(
                f"the open sessions of this API key would have {own} tokens; at most "
                f"{self._own_tokens} are kept for one key: close some, or append less"
            )
        if total > self._limits.max_tokens:
            raise QueueFullError(
                f"all open sessions would have {total} tokens; at most {self._limits.max_tokens} "
                "are kept (max_tokens): close some, or append less"
            )

    def find_place(self, sessions: Iterable[AsyncSession], owner: str) -> AsyncSession | None:
        """The session that one more of an owner takes the place of; None: there is room.

        Raises QueueFullError, or KeyLimitError, where none was idle for long enough.
        """
        everybody = list(sessions)
        own = [session for session in everybody if session.owner == owner]
        if owner and len(own) >= self._own_sessions:
            if (oldest := self._find_idle(own)) is not None:
                return oldest
            raise KeyLimitError(
                f"an API key may have {self._own_sessions} open sessions; this one has as many "
                f"{self._and_none_idle}"
            )
        if len(everybody) < self._limits.max_open:
            return None
        if (oldest := self._find_idle(everybody)) is not None:
            return oldest
        raise QueueFullError(f"{len(everybody)} sessions are open (max_open) {self._and_none_idle}")

    @property
    def _and_none_idle(self) -> str:
        seconds = self._limits.idle_seconds
        return f"and none was idle for {seconds:g} s: close one, or try again later"

    def _find_idle(self, sessions: list[AsyncSession]) -> AsyncSession | None:
        idle = [session for session in sessions if not session.is_in_use]
        oldest = min(idle, key=lambda session: session.last_used, default=None)
        if oldest is None or time.monotonic() - oldest.last_used < self._limits.idle_seconds:
            return None
        return oldest
