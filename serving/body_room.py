"""How many bytes of requests may lie in memory at a time, however many connections send them.

A request's bytes are kept until it is answered. Each transport has one of these, of which one API
key may have half, so that nobody shuts all others out.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from swiftjax.errors import KeyLimitError, QueueFullError
from swiftjax.serving.caller import current_caller

MAX_BYTES_INSIDE = 512 * 2**20


class BodyRoom:
    """Counts for one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES_INSIDE) -> None:
        self.num_bytes = 0
        self.by_key: Counter[str] = Counter()
        self._max_bytes = max_bytes

    @contextmanager
    def holding(self, num_bytes: int = 0) -> Iterator["Held"]:
        """Have room for a request of the current call; raises QueueFullError or KeyLimitError."""
        held = Held(self, current_caller().name)
        try:
            held.add(num_bytes)
            yield held
        finally:
            self.give_back(held)

    def give_back(self, held: "Held") -> None:
        """A request is answered."""
        self.num_bytes -= held.num_bytes
        self.by_key[held.key] -= held.num_bytes
        if not self.by_key[held.key]:
            del self.by_key[held.key]

    def check(self, num_bytes: int, key: str) -> None:
        """Raise QueueFullError, or KeyLimitError, where so many more would be too many."""
        if key and self.by_key[key] + num_bytes > self._max_bytes // 2:
            raise KeyLimitError(
                f"requests of this API key that are read or answered have {self.by_key[key]} "
                f"bytes; {self._max_bytes // 2} are taken at a time: try again when some have ended"
            )
        if self.num_bytes + num_bytes > self._max_bytes:
            raise QueueFullError(
                f"requests that are read or answered have {self.num_bytes} bytes; "
                f"{self._max_bytes} are taken at a time: try again later, or send less at a time"
            )


class Held:
    """What one request holds."""

    def __init__(self, room: BodyRoom, key: str) -> None:
        self.num_bytes = 0
        self.key = key
        self._room = room

    def add(self, num_bytes: int) -> None:
        """Take what has come; raises QueueFullError."""
        self._room.check(num_bytes, self.key)
        self._room.num_bytes += num_bytes
        self._room.by_key[self.key] += num_bytes
        self.num_bytes += num_bytes
