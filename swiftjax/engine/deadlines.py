"""When open requests end at the latest, the earliest first; knows ids and times only.

Called by the scheduler. Most requests end before their deadline, so what has ended is swept out
now and then: never more entries are kept than twice the open requests, and a few.
"""

import heapq
import math

_FEW = 64


class Deadlines:
    """A heap of times with O(log n) changes, amortised."""

    def __init__(self) -> None:
        self._open: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries kept, those of ended requests included."""
        return len(self._heap)

    def add(self, request_id: str, deadline: float) -> None:
        """Watch an open request."""
        self._open[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))

    def drop(self, request_id: str) -> None:
        """Watch a request no longer; one that had no deadline is ignored."""
        self._open.pop(request_id, None)
        if len(self._heap) > 2 * len(self._open) + _FEW:
            self._heap = [(deadline, name) for name, deadline in self._open.items()]
            heapq.heapify(self._heap)

    def earliest(self) -> float:
        """The next deadline of an open request; infinity if there is none."""
        while self._heap:
            deadline, request_id = self._heap[0]
            if self._open.get(request_id) == deadline:
                return deadline
            heapq.heappop(self._heap)
        return math.inf

    def pop_due(self, now: float) -> list[str]:
        """Stop watching those whose time has come, and name them."""
        due = []
        while self.earliest() <= now:
            _, request_id = heapq.heappop(self._heap)
            del self._open[request_id]
            due.append(request_id)
        return due
