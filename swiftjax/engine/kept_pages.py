"""Pages of sessions between their turns: what one turn leaves here, the next one starts from.

They stay on the device while there is room; then the least recently used are copied out, and of the
copies the least recently used are dropped: such a session is computed again from its text. Knows
tokens and page ids, no sequences; where a copy lies is for the runner. Called by SequencePages.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from swiftjax.batch import PageMove
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.streaming import Streaming

# Copies of preempted requests are named by their ids, which clients may choose, but without control
# characters: so none of them can be the name of a session's copy.
SESSION_KEY = "\nsession"


class KeptLimits(NamedTuple):
    """Most pages that idle sessions own on the device, and that lie in copies elsewhere."""

    device_pages: int = 0
    stored_pages: int = 0


NOTHING_KEPT = KeptLimits()


class StoredCopy:
    """A copy outside the device, for one session or for several that forked from it."""

    __slots__ = ("key", "num_owners", "num_pages")

    def __init__(self, key: str, num_pages: int) -> None:
        self.key, self.num_pages, self.num_owners = key, num_pages, 1


class Kept(NamedTuple):
    """What one session keeps: pages of the device, or a copy of them."""

    token_ids: SequenceOf[int]  # of which the first `known` are in the pages
    known: int
    num_dropped: int  # pages behind the sinks that were given back before
    streaming: Streaming | None
    salt: str
    page_ids: tuple[int, ...]
    copy: StoredCopy | None = None

    @property
    def num_pages(self) -> int:
        """Pages, wherever they are."""
        return len(self.page_ids) if self.copy is None else self.copy.num_pages

    def usable_len(self, token_ids: SequenceOf[int], page_size: int) -> int:
        """First tokens of a text that need not be computed; the last one of it always is."""
        most = min(self.known, len(token_ids) - 1)
        if self.token_ids is not token_ids and self.token_ids[:most] != token_ids[:most]:
            pairs = zip(self.token_ids, token_ids, strict=False)
            most = next(i for i, (mine, other) in enumerate(pairs) if mine != other)
        if self.streaming is not None and self.num_dropped:
            # Further back the window would reach into pages that are gone.
            expired = self.streaming.expired_pages(most, page_size)
            return most if self.num_dropped <= expired else 0
        return most


class KeptPages:
    """The pages of all idle sessions of one pool."""

    def __init__(self, pool: PagePool, limits: KeptLimits) -> None:
        self.num_on_device = 0  # pages, one that two sessions share counted twice
        self.num_stored = 0
        # Has a copy at hand that is to move in, or says that it is lost; the core sets this.
        self.fetch: Callable[[str], bool] = lambda key: True
        self._pool = pool
        self._limits = limits
        self._entries: OrderedDict[str, Kept] = OrderedDict()  # the least recently used first
        self._keys = (f"{SESSION_KEY} {number}" for number in itertools.count())
        self._out: list[PageMove] = []
        self._unused: list[str] = []  # copies without an owner

    def get(self, session: str) -> Kept | None:
        """What a session keeps."""
        return self._entries.get(session)

    def owned_pages(self) -> Iterator[int]:
        """Every page of the device that a session keeps, once per session."""
        return (page for kept in self._entries.values() for page in kept.page_ids)

    def put(self, session: str, kept: Kept) -> None:
        """Keep pages that were somebody's; what the session kept before is given up."""
        self.drop(session)
        self._entries[session] = kept
        self._count(kept, 1)
        while self.num_on_device > self._limits.device_pages:
            self._move_out(next(self._on_device()))
        self._limit_copies()

    def take(self, session: str) -> Kept:
        """Hand over what a session keeps: pages now are the caller's, a copy is to be released."""
        kept = self._entries.pop(session)
        self._count(kept, -1)
        return kept

    def drop(self, session: str) -> None:
        """Give up what a session keeps, if anything."""
        if session in self._entries:
            self._release(self.take(session))

    def drop_all(self) -> None:
        """Give up what all sessions keep."""
        for session in list(self._entries):
            self.drop(session)

    def fork(self, session: str, fork: str) -> None:
        """Let a second session keep the same; nothing if there is nothing."""
        kept = self._entries.get(session)
        if kept is None:
            return
        self._pool.share(kept.page_ids)
        if kept.copy is not None:
            kept.copy.num_owners += 1
        self.put(fork, kept)

    def new_key(self) -> str:
        """A key for a copy that the caller makes."""
        return next(self._keys)

    def store(self, session: str, kept: Kept, key: str) -> None:
        """Keep what lies in a copy under a new key."""
        copy = StoredCopy(key, kept.num_pages)
        self.put(session, kept._replace(page_ids=(), copy=copy))

    def make_room(self, count: int, spare: str = "") -> bool:
        """Copy pages out until `count` are free; `spare` names a session to leave alone.

        False, with nothing moved, where they could not be enough.
        """
        if count > self._pool.num_free + self.num_on_device:
            return False
        while count > self._pool.num_free:
            session = next((name for name in self._on_device() if name != spare), None)
            if session is None:
                return False
            self._move_out(session)
            self._limit_copies(spare)
        return True

    def release_copy(self, copy: StoredCopy) -> None:
        """One session less needs a copy."""
        copy.num_owners -= 1
        if not copy.num_owners:
            self._unused.append(copy.key)

    def take_moves(self) -> tuple[list[PageMove], list[str]]:
        """Pages to copy out before anything is written to them, and copies to drop after that."""
        moves = self._out, self._unused
        self._out, self._unused = [], []
        return moves

    def _on_device(self) -> Iterator[str]:
        return (name for name, kept in self._entries.items() if kept.copy is None)

    def _move_out(self, session: str) -> None:
        kept = self._entries[session]
        if kept.num_pages > self._limits.stored_pages:
            return self.drop(session)
        self._count(kept, -1)
        copy = StoredCopy(self.new_key(), kept.num_pages)
        self._out.append(PageMove(copy.key, kept.page_ids))
        self._pool.release(list(kept.page_ids))
        self._entries[session] = kept = kept._replace(page_ids=(), copy=copy)  # keeps its place
        self._count(kept, 1)

    def _limit_copies(self, spare: str = "") -> None:
        over = self.num_stored - self._limits.stored_pages
        if over <= 0:
            return
        for session in [
            name for name, kept in self._entries.items() if kept.copy and name != spare
        ]:
            over -= self._entries[session].num_pages
            self.drop(session)
            if over <= 0:
                return

    def _release(self, kept: Kept) -> None:
        self._pool.release(list(kept.page_ids))
        if kept.copy is not None:
            self.release_copy(kept.copy)

    def _count(self, kept: Kept, sign: int) -> None:
        if kept.copy is None:
            self.num_on_device += sign * kept.num_pages
        else:
            self.num_stored += sign * kept.num_pages
