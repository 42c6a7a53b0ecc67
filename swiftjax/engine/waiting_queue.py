"""The queue of requests that have not started: a heap under a policy, so that no step sorts it.

Keys may rise while a request waits (a fair policy's do); an entry is checked when it reaches the
top. Filled by `SequenceTable`, read by `Admission` and its gate.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Any

from swiftjax.engine.policies import PolicyState, QueuePolicy
from swiftjax.engine.sequence import Sequence

_FEW = 64


class WaitingQueue:
    """Sequences in state "waiting", the next one on top; O(log n) a push or pop, amortised."""

    def __init__(self, policy: QueuePolicy, state: PolicyState) -> None:
        self._policy = policy
        self._state = state
        self._heap: list[tuple[Any, int, Sequence]] = []
        # A plain dict finds its first entry ever more slowly as entries before it go.
        self._by_order: OrderedDict[int, Sequence] = OrderedDict()
        self.last_order = -1  # of the newest sequence that was queued

    def __len__(self) -> int:
        return len(self._by_order)

    @property
    def oldest(self) -> Sequence | None:
        """The sequence that was queued first."""
        return next(iter(self._by_order.values()), None)

    def oldest_ones(self, count: int) -> Iterator[Sequence]:
        """The `count` sequences that were queued first, or all."""
        return islice(self._by_order.values(), count)

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._by_order[sequence.order] = sequence
        self.last_order = max(self.last_order, sequence.order)
        heapq.heappush(self._heap, (self._key(sequence), sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The sequence that goes next, left in place."""
        while self._heap:
            key, order, sequence = self._heap[0]
            if sequence.state != "waiting":  # it was removed
                heapq.heappop(self._heap)
                continue
            current = self._key(sequence)
            if current == key:
                return sequence
            heapq.heapreplace(self._heap, (current, order, sequence))
        return None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose state the caller changes; its entry goes when it surfaces.

        Or sooner: while nobody starts none surfaces, and clients may come and go all the time.
        """
        del self._by_order[sequence.order]
        if len(self._heap) > 2 * len(self._by_order) + _FEW:
            self._heap = [entry for entry in self._heap if entry[1] in self._by_order]
            heapq.heapify(self._heap)

    def _key(self, sequence: Sequence) -> Any:
        return self._policy(sequence.request, self._state)
