"""Where saved sessions lie: a file for each name of each key, and how much there may be of them.

The engine reads and writes them; here are their places. Used by `session_desk.py`.
"""

import hashlib
import re
import time
from contextlib import suppress
from pathlib import Path

from swiftjax.errors import InvalidRequestError, KeyLimitError, QueueFullError, UnknownSessionError

GIB = 2**30
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
# A small file counts for so much: there must not be millions of them either.
MIN_BYTES = 2**20
# What a server left that was killed while it wrote; another one may write there now.
_UNFINISHED, _UNFINISHED_SECONDS = ".*.session.*", 3600.0


class SessionFiles:
    """The saved sessions of one folder. One key may have a share of what all may take."""

    def __init__(self, folder: Path, max_bytes: float = 64 * GIB, owner_share: float = 0.5) -> None:
        """Remove what was left unfinished long ago."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._own_bytes = max_bytes * owner_share
        for path in folder.glob(_UNFINISHED):
            with suppress(OSError):  # another server removes it too
                if time.time() - path.stat().st_mtime > _UNFINISHED_SECONDS:
                    path.unlink()

    def path(self, name: str, owner: str) -> Path:
        """The file of a name; raises InvalidRequestError for what is none."""
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"a session cannot be named {name!r:.140}: use up to 128 letters, digits, dots, "
                "dashes and underscores, the first no dot"
            )
        return self._folder / f"{_prefix(owner)}{name}.session"

    def check_room(self, path: Path, owner: str) -> None:
        """Raise where files take too much already, but for the one that is to be replaced.

        KeyLimitError where it is those of one key, QueueFullError where it is all.
        """
        total = own = 0
        for found in self._folder.glob("*.session"):
            if found == path:
                continue
            with suppress(OSError):  # deleted meanwhile
                size = max(MIN_BYTES, found.stat().st_size)
                total += size
                own += size if found.name.startswith(_prefix(owner)) else 0
        remedy = "delete some, or save under a name that there is"
        if owner and own >= self._own_bytes:
            raise KeyLimitError(
                f"the saved sessions of this API key take {own / GIB:.3g} GiB; one key may have "
                f"{self._own_bytes / GIB:.3g}: {remedy}"
            )
        if total >= self._max_bytes:
            raise QueueFullError(
                f"all saved sessions take {total / GIB:.3g} GiB of {self._max_bytes / GIB:.3g}: "
                f"{remedy}"
            )

    def delete(self, name: str, owner: str) -> None:
        """Delete a file; raises UnknownSessionError where there is none."""
        try:
            self.path(name, owner).unlink()
        except FileNotFoundError:
            raise UnknownSessionError(f"no session {name!r:.140} is saved") from None
        except OSError as error:
            text = f"cannot delete session {name!r:.140}: {error.strerror}"
            raise InvalidRequestError(text) from error


def _prefix(owner: str) -> str:
    # So that nobody reads another key's conversations by guessing their names.
    return (hashlib.sha256(owner.encode()).hexdigest()[:16] if owner else "all") + "-"
