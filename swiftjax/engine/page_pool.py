"""Owner of all KV page ids: who uses a page, and which unused pages still hold something useful.

It never sees a Sequence, a token or an array: ids and opaque keys in, ids out. A page is free, in
use by one or more owners, or idle: published under a key (see `prefix_cache.py`), without an owner,
kept until somebody asks for its contents or its space is needed. Called by the scheduler and those
of its parts that give and take pages.
"""

from collections import OrderedDict
from collections.abc import Iterable


class PagePool:
    """Pages by owner and by content; every operation is O(1) per page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # The last id released is the first reused: its memory is the likeliest to be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages without an owner whose contents can still be found."""
        return len(self._idle)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, evicting idle ones if need be, or none at all when fewer are left."""
        if count > self.num_free:
            return None
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def release(self, pages: list[int]) -> None:
        """Give up one ownership of each page; a page that has no owner is our own bug."""
        # Backwards, so that the head of a prefix, which more prompts share, is evicted last.
        for page in reversed(pages):
            assert self._owners[page] > 0, f"page {page} released once too often"
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Let the contents of an owned, full page be found under a key; the first page wins."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def take_published(self, keys: Iterable[bytes]) -> list[int]:
        """Become an owner of the pages published under the longest known run of keys."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._owners[page] == 0:
                del self._idle[page]
            self._owners[page] += 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Become one more owner of pages that somebody owns."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} has no owner to share with"
            self._owners[page] += 1

    def is_private(self, page: int) -> bool:
        """Whether an owned page may be written to: it has one owner and nobody can find it."""
        return self._owners[page] == 1 and page not in self._key_of

    def forget_published(self) -> None:
        """Drop every key, as when the weights change; pages in use stay with their owners."""
        self._free += self._idle
        self._idle.clear()
        self._key_of.clear()
        self._page_of.clear()

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that `owned` (a page once per owner) is exactly what the pool believes."""
        counts = [0] * self.num_pages
        for page in owned:
            counts[page] += 1
        assert counts == self._owners, "a page is owned by more or fewer than its count says"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free) and not free & idle, "a page is free twice"
        in_use = sum(count > 0 for count in counts)
        assert len(free) + len(idle) + in_use == self.num_pages, "a page was lost"
        assert not any(counts[page] for page in free | idle), "a free page has an owner"
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert idle <= set(self._key_of) and not free & set(self._key_of)
