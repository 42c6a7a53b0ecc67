"""Tests that say how soon something happens, on machines that are slow or stand still now and then.

What such a test saw while its processes did not run says nothing of the code. It is then tried
again; a failure while they ran is one at once. Knows nothing of what is tested.
"""

import functools
import gc
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import pytest

TICK = 0.01
# So much later than it was to be a thread goes on where the machine is busy, but runs.
STALL_SECONDS = 0.15
# Where something waits for a processor for so much of the time, there are too few of them.
STARVED_SHARE = 0.25
PRESSURE = Path("/proc/pressure/cpu")  # of Linux, if its kernel counts it
TRIES = 5


def seconds_waited() -> float:
    """For how long, since the machine started, something on it has waited for a processor."""
    try:
        return int(PRESSURE.read_text().partition("total=")[2].split()[0]) / 1e6
    except OSError:
        return 0.0


class StallWatch:
    """A thread that sleeps again and again, and sees when it was woken too late."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._started, self._waited = time.monotonic(), seconds_waited()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def __enter__(self) -> "StallWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def ran(self) -> bool:
        """Whether the machine let its processes run so far."""
        share = (seconds_waited() - self._waited) / (time.monotonic() - self._started)
        return self.longest < STALL_SECONDS and share < STARVED_SHARE

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._end.wait(TICK):
            now = time.monotonic()
            self.longest = max(self.longest, now - before - TICK)
            before = now


P = ParamSpec("P")


def tried_again_after_stalls(test: Callable[P, None]) -> Callable[P, None]:
    """Mark a test that compares times."""

    @functools.wraps(test)
    def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        for tries_left in reversed(range(TRIES)):
            with StallWatch() as watch:
                try:
                    test(*args, **kwargs)
                    return
                except (Exception, pytest.fail.Exception):
                    time.sleep(3 * TICK)  # so that it sees a stall of this very moment
                    if not tries_left or watch.ran():
                        raise
            print("tried again: the machine stood still or was busy")
            with warnings.catch_warnings(action="ignore"):
                gc.collect()  # what the failure left open

    return tried
