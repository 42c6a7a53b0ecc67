"""What sessions asked their engine to do and is not done yet: saving to a file, loading from one.

Lives on the event loop, one question per session at a time. Used by `AsyncSessions`.
"""

import asyncio

from swiftjax.engine.engine_link import EngineLink
from swiftjax.engine.link_messages import LoadSession, SaveSession, SessionDone
from swiftjax.errors import InvalidRequestError, SwiftJaxError


class SessionAsks:
    """Open questions by session."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._open: dict[str, asyncio.Future[SessionDone]] = {}

    async def ask(self, order: SaveSession | LoadSession) -> SessionDone:
        """Order something and wait until it is done; raises what went wrong."""
        if order.session in self._open:
            raise InvalidRequestError("the session is being saved: wait for that first")
        future: asyncio.Future[SessionDone] = asyncio.get_running_loop().create_future()
        self._open[order.session] = future
        self._link.order_session(order)
        done = await asyncio.shield(future)  # the engine answers whether or not anybody waits
        if done.problem is not None:
            raise done.problem.error()
        return done

    def take(self, done: SessionDone) -> None:
        """The engine answered."""
        if future := self._open.pop(done.session, None):
            future.set_result(done)

    def fail(self, error: SwiftJaxError) -> None:
        """The engine has ended."""
        for future in self._open.values():
            future.set_exception(error)
            future.exception()  # whoever waited may be gone
        self._open.clear()
