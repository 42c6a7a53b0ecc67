"""How many bytes of requests may lie in memory at a time, however many connections send them.

A request's bytes are kept until it is answered. Each transport has one of these.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from swiftjax.errors import QueueFullError

MAX_BYTES_INSIDE = 512 * 2**20


class BodyRoom:
    """Counts for one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES_INSIDE) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    @contextmanager
    def holding(self, num_bytes: int = 0) -> Iterator["Held"]:
        """Have room for a request while the context lasts; raises QueueFullError."""
        held = Held(self)
        try:
            held.add(num_bytes)
            yield held
        finally:
            self.num_bytes -= held.num_bytes

    def check(self, num_bytes: int) -> None:
        """Raise QueueFullError where so many more would be too many."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise QueueFullError(
                f"requests that are read or answered have {self.num_bytes} bytes; "
                f"{self._max_bytes} are taken at a time: try again later, or send less at a time"
            )


class Held:
    """What one request holds."""

    def __init__(self, room: BodyRoom) -> None:
        self.num_bytes = 0
        self._room = room

    def add(self, num_bytes: int) -> None:
        """Take what has come; raises QueueFullError."""
        self._room.check(num_bytes)
        self._room.num_bytes += num_bytes
        self.num_bytes += num_bytes
