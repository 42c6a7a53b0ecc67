"""Carries out what a front end orders for sessions, in the process of the engine.

Pages are copied on the engine's thread, between two steps; files are hashed, written and read on a
thread of their own, beside the steps. No pages cross to the front end.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from swiftjax.engine.link_messages import (
    CloseSession,
    ForkSession,
    LoadSession,
    Problem,
    SaveSession,
    SessionDone,
    SessionOrder,
)
from swiftjax.engine.session_file import SavedSession, keep_session, read_session, write_session
from swiftjax.engine.session_pages import SessionPages
from swiftjax.errors import SwiftJaxError

logger = logging.getLogger(__name__)


class SessionDesk:
    """Of one engine, on whose thread everything here is called."""

    def __init__(
        self,
        pages: SessionPages,
        call: Callable[[Callable[[], None]], None],
        tell: Callable[[SessionDone], None],
    ) -> None:
        """`call` has the engine's thread call something, `tell` takes answers on it."""
        self._pages = pages
        self._call = call
        self._tell = tell
        self._files = ThreadPoolExecutor(1, "swiftjax-session-files")
        self._loading: set[str] = set()  # and not closed meanwhile
        self._to_save: deque[SaveSession] = deque()  # the first is being written

    def obey(self, order: SessionOrder) -> None:
        """Do it, or begin to; what there is to tell is told later, errors too."""
        match order:
            case CloseSession(session):
                self._loading.discard(session)
                self._pages.close(session)
            case ForkSession(session, fork):
                self._pages.fork(session, fork)
            case SaveSession():
                self._to_save.append(order)
                if len(self._to_save) == 1:
                    self._save_next()
            case LoadSession(session, path):
                self._loading.add(session)
                self._files.submit(self._read, session, Path(path))

    def _save_next(self) -> None:
        """Copy pages and have them written: of one session at a time, or memory would not do."""
        session, path, state = msgspec.structs.astuple(self._to_save[0])
        saved = SavedSession(state, self._pages.save(session, state.token_ids))
        self._files.submit(self._write, session, Path(path), saved)

    def _write(self, session: str, path: Path, saved: SavedSession) -> None:
        def write() -> SessionDone:
            write_session(path, saved)
            return SessionDone(session)

        done = _attempt(session, write)
        self._call(lambda: self._written(done))

    def _written(self, done: SessionDone) -> None:
        self._tell(done)
        self._to_save.popleft()
        if self._to_save:
            self._save_next()

    def _read(self, session: str, path: Path) -> None:
        found: list[SavedSession] = []

        def read() -> SessionDone:
            found.append(read_session(path))
            return SessionDone(session, found[0].state)

        done = _attempt(session, read)
        self._call(lambda: self._keep(session, path, found, done))

    def _keep(self, session: str, path: Path, found: list[SavedSession], done: SessionDone) -> None:
        """Keep what was read, unless whoever asked has given it up."""
        if session in self._loading and done.problem is None:

            def keep() -> SessionDone:
                keep_session(self._pages, session, found[0], path)
                return done

            done = _attempt(session, keep)
        self._loading.discard(session)
        self._tell(done)


def _attempt(session: str, do: Callable[[], SessionDone]) -> SessionDone:
    """What is to be told; whatever a file is like, the engine goes on."""
    try:
        return do()
    except SwiftJaxError as error:
        return SessionDone(session, problem=Problem.of(error))
    except Exception as error:
        logger.exception("a session could not be saved or restored")
        bug = SwiftJaxError(f"the session could not be saved or restored: {type(error).__name__}")
        return SessionDone(session, problem=Problem.of(bug))
