"""Holds newcomers back for a moment, so that they start together: larger batches, later answers.

Opens when `min_batch_size` requests wait or the oldest of them has waited `max_wait` seconds, and
for all that wait then, however long it takes until there is room for them. Asked by `Admission`.
"""

import math

from swiftjax.engine.waiting_queue import WaitingQueue


class AdmissionGate:
    """Stands before one queue; `min_batch_size` 1 is always open."""

    def __init__(self, queue: WaitingQueue, min_batch_size: int, max_wait: float) -> None:
        self._queue = queue
        self._min_batch_size = min_batch_size
        self._max_wait = max_wait
        self._last_let_in = -1  # everybody up to this order of submission may start

    def opens_at(self, num_free_rows: int) -> float:
        """From when on somebody may start: -inf at once, +inf while nobody waits."""
        if (oldest := self._queue.oldest) is None:
            return math.inf
        # More than fit are not worth waiting for.
        enough = min(self._min_batch_size, num_free_rows)
        if len(self._queue) >= enough or oldest.order <= self._last_let_in:
            return -math.inf
        return oldest.request.arrival_time + self._max_wait

    def is_open(self, now: float, num_free_rows: int) -> bool:
        """Whether those that wait may start; if so, they all may from now on."""
        if self.opens_at(num_free_rows) > now:
            return False
        self._last_let_in = self._queue.last_order
        return True
