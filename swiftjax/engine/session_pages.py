"""What a core does for sessions between their turns: close, fork, save and load their pages.

A turn itself is an ordinary request that names its session; the scheduler lets it start from the
pages that the last one left. Knows pages and fingerprints, no texts and no files. Belongs to the
core, like everything it calls.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from swiftjax.batch import PageMove, PageMoves
from swiftjax.engine.kept_pages import SESSION_KEY, Kept, KeptPages
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError

_TO_SAVE = f"{SESSION_KEY} to save"


@runtime_checkable
class PageStore(Protocol):
    """The data plane, as sessions see it."""

    def move(self, moves: PageMoves) -> None:
        """Move pages between two steps."""
        ...

    def fetch_copy(self, key: str) -> bool:
        """Have pages at hand that were moved out, to be moved in or read; False: they are lost."""
        ...

    def read_copy(self, key: str, num_pages: int) -> list[np.ndarray]:
        """The contents of pages that were fetched."""
        ...

    def load_copy(self, key: str, num_pages: int, chunks: SequenceOf[np.ndarray]) -> None:
        """Take contents as pages that were moved out; raises ValueError if they do not fit."""
        ...

    def fingerprint(self) -> str:
        """What tells this model with these weights from any other."""
        ...


class SavedPages(NamedTuple):
    """What one session keeps, as arrays: bit for bit what its next turn starts from."""

    fingerprint: str
    page_size: int
    known: int  # first tokens of the text that are in the pages
    num_dropped: int
    salt: str
    num_pages: int
    chunks: tuple[np.ndarray, ...]


class SessionPages:
    """The pages of idle sessions of one core."""

    def __init__(self, kept: KeptPages, store: PageStore, page_size: int) -> None:
        self._kept = kept
        self._store = store
        kept.fetch = store.fetch_copy
        self._page_size = page_size

    def close(self, session: str) -> None:
        """Give up what a session keeps; an unknown one is ignored."""
        self._kept.drop(session)

    def forget(self) -> None:
        """Give up what all sessions keep; their next turns compute their texts again."""
        self._kept.drop_all()

    def fork(self, session: str, fork: str) -> None:
        """Let another session start from the same pages."""
        self._kept.fork(session, fork)

    def save(self, session: str, token_ids: SequenceOf[int]) -> SavedPages:
        """Copy what a session keeps of its text, and leave it; no pages where there are none."""
        kept, size = self._kept.get(session), self._page_size
        fingerprint = self._store.fingerprint()
        nothing = SavedPages(fingerprint, size, 0, 0, "", 0, ())
        known = 0 if kept is None else kept.usable_len([*token_ids, -1], size)
        if kept is None or not known:
            return nothing
        out, unused = self._kept.take_moves()
        own = [] if kept.copy else [PageMove(_TO_SAVE, kept.page_ids)]
        self._store.move(PageMoves(out=(*out, *own), drop=tuple(unused)))
        key = kept.copy.key if kept.copy else _TO_SAVE
        num_pages = -(-known // size) - kept.num_dropped
        is_there = self._store.fetch_copy(key)
        chunks = tuple(self._store.read_copy(key, num_pages)) if is_there else ()
        # Also where nothing is to be dropped: what was fetched is let go.
        self._store.move(PageMoves(drop=(_TO_SAVE,) if own else ()))
        if not is_there:
            return nothing
        return SavedPages(fingerprint, size, known, kept.num_dropped, kept.salt, num_pages, chunks)

    def load(
        self,
        session: str,
        saved: SavedPages,
        token_ids: SequenceOf[int],
        streaming: Streaming | None,
    ) -> None:
        """Keep saved pages for a session of this text.

        Raises InvalidRequestError for those of another model, or of another form.
        """
        if saved.fingerprint != self._store.fingerprint():
            raise InvalidRequestError(
                "the session was saved by another model, or by other weights, another dtype or "
                "another KV cache of it: load the same checkpoint in the same way"
            )
        if saved.page_size != self._page_size:
            raise InvalidRequestError(
                f"the session was saved in pages of {saved.page_size} tokens; this engine has "
                f"pages of {self._page_size}: start it with page_size {saved.page_size}"
            )
        if not saved.num_pages:
            return
        self._check(saved, len(token_ids), streaming is not None)
        kept = Kept(
            list(token_ids),
            saved.known,
            saved.num_dropped,
            streaming,
            saved.salt,
            tuple(range(saved.num_pages)),
        )
        key = self._kept.new_key()
        try:
            self._store.load_copy(key, saved.num_pages, saved.chunks)
        except ValueError as error:
            raise InvalidRequestError(f"the session's pages do not fit: {error}") from error
        self._kept.store(session, kept, key)

    def _check(self, saved: SavedPages, num_tokens: int, streams: bool) -> None:
        """What a consistent file can't get wrong, and a forged one could."""
        pages = -(-saved.known // self._page_size) - saved.num_dropped
        dropped = saved.num_dropped if streams else -saved.num_dropped
        if not (0 < saved.known <= num_tokens and 0 < pages == saved.num_pages and dropped >= 0):
            raise InvalidRequestError(
                f"the session says it has {saved.known} of {num_tokens} tokens in "
                f"{saved.num_pages} pages, {saved.num_dropped} given back: that cannot be"
            )
