"""Sessions as both transports reach them: by an id, each caller its own, and in files by a name.

Knows no messages and no bodies. The engine reads and writes the files; here is where they lie.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftjax.engine.async_session import AsyncSession
from swiftjax.errors import InvalidRequestError
from swiftjax.serving.served import Served

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def find_session(served: Served, session_id: str, owner: str) -> AsyncSession:
    """The open session of a caller; raises UnknownSessionError if there is none of this id."""
    return served.engine.sessions.find(session_id, owner)


async def save_session(served: Served, session_id: str, name: str, owner: str) -> None:
    """Write a session to a file of its caller, in place of an older one."""
    session, path = find_session(served, session_id, owner), _file(served, name, owner)
    with _called(path, name):
        await session.save(path)


async def restore_session(served: Served, name: str, owner: str) -> AsyncSession:
    """Open a session from a file of its caller; raises InvalidRequestError as `Engine` does."""
    path = _file(served, name, owner)
    with _called(path, name):
        return await served.engine.sessions.restore(path, owner)


def _file(served: Served, name: str, owner: str) -> Path:
    if served.session_folder is None:
        raise InvalidRequestError(
            "this server has no folder for sessions: start it with --session-dir"
        )
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"a session cannot be named {name!r:.140}: use up to 128 letters, digits, dots, dashes "
            "and underscores, the first no dot"
        )
    # So that nobody reads another key's conversations by guessing their names.
    whose = hashlib.sha256(owner.encode()).hexdigest()[:16] if owner else "all"
    return served.session_folder / f"{whose}-{name}.session"


@contextmanager
def _called(path: Path, name: str) -> Iterator[None]:
    """Let errors name a file as its caller does: where it lies here is nobody's business."""
    try:
        yield
    except InvalidRequestError as error:
        text = str(error).replace(str(path), f"session {name!r}")
        raise InvalidRequestError(text) from error
