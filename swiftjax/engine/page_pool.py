"""Owner of all KV page ids. It never sees a Sequence, a token or an array: ids in, ids out.

The device pool is allocated once; a page id is an index into it. Called by the scheduler only.
"""


class PagePool:
    """A free list of page ids with O(1) allocate and release per page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # The last id released is the first reused: its memory is the likeliest to be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._in_use = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, or none at all when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._in_use[page] = 1
        return pages

    def release(self, pages: list[int]) -> None:
        """Give pages back; a page that is not in use is our own bug."""
        for page in pages:
            assert self._in_use[page], f"page {page} released twice"
            self._in_use[page] = 0
            self._free.append(page)

    def check_integrity(self) -> None:
        """Assert that every page is either free or in use, exactly once."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert sum(self._in_use) + len(self._free) == self.num_pages, "a page was lost"
        assert not any(self._in_use[page] for page in self._free), "a free page is in use"
