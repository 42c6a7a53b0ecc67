"""Ends a streamed answer of which a client takes nothing for long; both transports use it.

Its request was aborted before (`engine/mailbox.py`). What is left is the call itself: what it
asked, a place among the calls that a drain waits for, and what was not sent.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from time import monotonic

from swiftjax.errors import SlowReaderError

# A client that takes nothing for this long is taken for gone.
SEND_SECONDS = 60.0


class Patience:
    """Looks now and then: a timer for every message would take as long as the message."""

    def __init__(self, seconds: float, limit: asyncio.Timeout) -> None:
        self.since: float | None = None  # when what is being sent was given to the client
        self._seconds = seconds
        self._limit = limit
        self._look()

    def _look(self) -> None:
        if self.since is not None and monotonic() - self.since >= self._seconds:
            self._limit.reschedule(0.0)
        else:
            loop = asyncio.get_running_loop()
            self._next = loop.call_later(SEND_SECONDS / 10, self._look)

    def stop(self) -> None:
        """Look no more."""
        self._next.cancel()


@asynccontextmanager
async def patience(max_paused_seconds: float = 0.0) -> AsyncGenerator[Patience, None]:
    """Raise SlowReaderError in the middle of a sending, set in `since`, that takes too long.

    That is SEND_SECONDS, or as long as a reader may stay away where that is more.
    """
    seconds = max(SEND_SECONDS, max_paused_seconds)
    try:
        async with asyncio.timeout(None) as limit:
            patient = Patience(seconds, limit)
            try:
                yield patient
            finally:
                patient.stop()
    except TimeoutError:
        text = f"nothing of the answer was taken for {seconds:g} s: read it as it comes"
        raise SlowReaderError(text) from None
