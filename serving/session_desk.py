"""Sessions as both transports reach them: by an id, each caller its own, and in files by a name.

Knows no messages and no bodies. The engine reads and writes the files; `session_files.py` knows
where they lie.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftjax.engine.async_session import AsyncSession
from swiftjax.errors import InvalidRequestError
from swiftjax.serving.served import Served
from swiftjax.serving.session_files import SessionFiles


def find_session(served: Served, session_id: str, owner: str) -> AsyncSession:
    """The open session of a caller; raises UnknownSessionError if there is none of this id."""
    return served.engine.sessions.find(session_id, owner)


async def save_session(served: Served, session_id: str, name: str, owner: str) -> None:
    """Write a session to a file of its caller, in place of an older one."""
    session, files = find_session(served, session_id, owner), _files(served)
    path = files.path(name, owner)
    await asyncio.to_thread(files.check_room, path, owner)
    with _called(path, name):
        await session.save(path)


async def restore_session(served: Served, name: str, owner: str) -> AsyncSession:
    """Open a session from a file of its caller; raises InvalidRequestError as `Engine` does."""
    path = _files(served).path(name, owner)
    with _called(path, name):
        return await served.engine.sessions.restore(path, owner)


async def delete_session(served: Served, name: str, owner: str) -> None:
    """Delete a file of a caller; raises UnknownSessionError where there is none."""
    await asyncio.to_thread(_files(served).delete, name, owner)


def _files(served: Served) -> SessionFiles:
    if served.session_files is None:
        raise InvalidRequestError(
            "this server has no folder for sessions: start it with --session-dir"
        )
    return served.session_files


@contextmanager
def _called(path: Path, name: str) -> Iterator[None]:
    """Let errors name a file as its caller does: where it lies here is nobody's business."""
    try:
        yield
    except InvalidRequestError as error:
        text = str(error).replace(str(path), f"session {name!r}")
        raise InvalidRequestError(text) from error
