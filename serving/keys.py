"""API keys: who may call at all, and who may also administrate.

Only sha256 digests are kept, and every one is compared in constant time, so neither a memory dump
nor the time of an answer tells a key. Reading files and the environment is the CLI's work.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import NamedTuple

from swiftjax.errors import ForbiddenError, InvalidRequestError, UnauthenticatedError
from swiftjax.serving.caller import Caller

MIN_KEY_CHARS = 8
MAX_KEY_CHARS = 512
ADMIN_MARK = "admin"


class KeyEntry(NamedTuple):
    """One key as an operator wrote it down."""

    key: str
    is_admin: bool = False


class _Known(NamedTuple):
    digest: bytes
    is_admin: bool


class KeyRing:
    """The keys of one server; with none, everybody may do everything."""

    def __init__(self, load: Callable[[], Iterable[KeyEntry]] = tuple) -> None:
        """`load` reads the keys, now and at each `reload`; raises InvalidRequestError."""
        self._load = load
        self._known: tuple[_Known, ...] = ()
        self.reload()

    def reload(self) -> None:
        """Read the keys again. Raises InvalidRequestError, and then the old ones hold."""
        entries = [_check(entry) for entry in self._load()]
        if self._known and not entries:
            raise InvalidRequestError("no API key is left: the old ones stay; stop the server")
        self._known = tuple(_Known(_digest(e.key.encode()), e.is_admin) for e in entries)

    @property
    def is_open(self) -> bool:
        """Whether there are no keys."""
        return not self._known

    @property
    def has_several(self) -> bool:
        """Whether one of them could be in another's way."""
        return len({known.digest for known in self._known}) > 1

    def check(self, authorization: bytes | None, *, for_admin: bool = False) -> Caller:
        """Let a bearer of a key in; gives a name for the key that does not tell it.

        Raises UnauthenticatedError, or ForbiddenError where the key lacks the right.
        """
        if self.is_open:
            return Caller(is_admin=True)
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise UnauthenticatedError("an API key is needed: send 'Authorization: Bearer KEY'")
        digest = _digest(key.strip())
        found = [known for known in self._known if hmac.compare_digest(known.digest, digest)]
        if not found:
            raise UnauthenticatedError("the API key is not known here")
        is_admin = any(known.is_admin for known in found)
        if for_admin and not is_admin:
            raise ForbiddenError("this needs an admin key; the key sent is an ordinary one")
        return Caller(digest.hex()[:16], is_admin)


def parse_keys(text: str) -> list[KeyEntry]:
    """Read lines of `KEY` or `KEY admin`; blank lines and those that start with # are skipped."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or words[1:] not in ([], [ADMIN_MARK]):
            raise InvalidRequestError(f"line {number} of the keys must be KEY or KEY {ADMIN_MARK}")
        entries.append(KeyEntry(words[0], len(words) == 2))
    return entries


def _check(entry: KeyEntry) -> KeyEntry:
    # The key itself must not reach a log, not even when it is wrong.
    if not MIN_KEY_CHARS <= len(entry.key) <= MAX_KEY_CHARS:
        raise InvalidRequestError(
            f"an API key has {len(entry.key)} characters; it must have {MIN_KEY_CHARS} to "
            f"{MAX_KEY_CHARS}"
        )
    if not entry.key.isascii() or not entry.key.isprintable() or " " in entry.key:
        raise InvalidRequestError("an API key must be printable ASCII without blanks")
    return entry


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
