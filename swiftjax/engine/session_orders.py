"""Carries out what a front end orders for sessions, in the process and on the thread of the engine.

Files are read and written here, between two steps, so that no pages cross to the front end.
"""

from pathlib import Path

from swiftjax.engine.link_messages import (
    CloseSession,
    ForkSession,
    LoadSession,
    Problem,
    SaveSession,
    SessionDone,
    SessionOrder,
)
from swiftjax.engine.session_file import load_session, save_session
from swiftjax.engine.session_pages import SessionPages
from swiftjax.errors import SwiftJaxError


def obey_session(pages: SessionPages, order: SessionOrder) -> SessionDone | None:
    """Do it; what there is to tell is told by what is returned, errors too."""
    match order:
        case CloseSession(session):
            pages.close(session)
        case ForkSession(session, fork):
            pages.fork(session, fork)
        case SaveSession(session, path, state):
            try:
                save_session(pages, session, state, Path(path))
            except SwiftJaxError as error:
                return SessionDone(session, problem=Problem.of(error))
            return SessionDone(session)
        case LoadSession(session, path):
            try:
                return SessionDone(session, load_session(pages, session, Path(path)))
            except SwiftJaxError as error:
                return SessionDone(session, problem=Problem.of(error))
    return None
