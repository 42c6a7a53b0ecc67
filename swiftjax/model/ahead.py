"""Do work ahead of whoever asks for it, in threads, in order and within a bound of bytes.

Used where tensors are read, so that reading, computing and writing overlap.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

BUDGET_BYTES = 512 * 2**20


def ahead(
    jobs: Iterable[tuple[int, Callable[[], Result]]], *, budget: int = BUDGET_BYTES
) -> Iterator[Result]:
    """Yield the result of every (bytes, function) in order.

    Work begins before it is asked for, on as many threads as there are cores, while the bytes of
    what was begun and not yet done with stay within the budget; one job that is larger runs alone.
    """
    waiting = deque(jobs)
    running: deque[tuple[int, Future[Result]]] = deque()
    taken = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        try:
            while waiting or running:
                while waiting and (not running or taken + waiting[0][0] <= budget):
                    num_bytes, run = waiting.popleft()
                    running.append((num_bytes, pool.submit(run)))
                    taken += num_bytes
                num_bytes, future = running.popleft()
                yield future.result()
                del future
                taken -= num_bytes
        finally:
            for _, future in running:
                future.cancel()
