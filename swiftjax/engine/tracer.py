"""Records what a scheduler saw and decided, as JSON lines, for `swiftjax replay`.

The engine's thread only notes values that never change again; a thread of the tracer's own turns
them into lines (`trace_lines.py`) and writes whole lines at once. A file that cannot be written any
more ends the recording, never the engine. Made by `build_core`, called by the engine core.
"""

import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

from swiftjax.engine.observer import Command
from swiftjax.engine.plan import Plan
from swiftjax.engine.request import Request, StepOutput
from swiftjax.engine.scheduler import Scheduler
from swiftjax.engine.trace_lines import (
    Event,
    LineMaker,
    Planned,
    Step,
    Submitted,
    Told,
    ToldTo,
    make_header,
)
from swiftjax.errors import InvalidRequestError

logger = logging.getLogger(__name__)


class Tracer:
    """An Observer that writes a trace; closed by `close`, at the latest when the process ends."""

    def __init__(
        self,
        path: str | Path,
        scheduler: Scheduler,
        *,
        salt: Callable[[Request], str] = lambda request: request.options.cache_salt,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Replace the file at `path`; raises InvalidRequestError where that is not possible."""
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise InvalidRequestError(f"cannot write the trace {path}: {error.strerror}") from error
        self._scheduler = scheduler
        self._clock = clock
        self._start = clock()
        self._num_steps = 0
        self._num_preemptions = 0
        self._last_read = self._start
        self._unread: deque[Planned] = deque()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        lines = LineMaker(self._start, scheduler.pool.page_size, salt)
        # The header waits for the first event: by then the engine has measured its costs.
        thread = threading.Thread(
            target=_write_all,
            args=(file, self._events, lambda: make_header(scheduler), lines),
            name="swiftjax-tracer",
            daemon=True,
        )
        thread.start()
        self.close = weakref.finalize(self, _finish, self._events, thread)

    def submitted(self, request: Request) -> None:
        """Note a request with the time and its place among the steps."""
        self._events.put(Submitted(request, self._clock(), self._num_steps))

    def told_to(self, what: Command, request_id: str) -> None:
        """Note it with the time and its place among the steps."""
        self._events.put(ToldTo(what, request_id, self._clock(), self._num_steps))

    def planned(self, plan: Plan, now: float) -> None:
        """Note how full pages and queues are once the step has its pages."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        pages = (pool.num_pages - pool.num_free, pool.num_free - pool.num_idle, pool.num_idle)
        queues = (scheduler.num_running, scheduler.num_waiting, scheduler.num_preempted)
        preemptions = scheduler.num_preemptions - self._num_preemptions
        self._num_preemptions = scheduler.num_preemptions
        in_flight = any(planned.plan.work for planned in self._unread)
        self._unread.append(Planned(plan, now, in_flight, pages, queues, preemptions))
        self._num_steps += 1

    def read(self, plan: Plan | None, outputs: list[StepOutput]) -> None:
        """Hand over the step that was read, and what ended with it."""
        now = self._clock()
        while self._unread and not self._unread[0].plan.work:
            self._hand_over(0.0)
        if plan is not None:
            self._hand_over(now - max(self._unread[0].now, self._last_read))
            self._last_read = now
        if outputs:
            self._events.put(Told(outputs, now, self._num_steps))

    def _hand_over(self, took: float) -> None:
        planned = self._unread.popleft()
        self._events.put(Step(self._num_steps - len(self._unread) - 1, took, planned))


def _write_all(
    file: int,
    events: "queue.SimpleQueue[Event | None]",
    header: Callable[[], str],
    lines: LineMaker,
) -> None:
    """Write the header, then every event's lines until None; whole lines in one call."""
    event = events.get()
    try:
        _write_lines(file, header())
        while event is not None:
            _write_lines(file, lines.of(event))
            event = events.get()
    except Exception:
        logger.exception("the trace ends here")
        while event is not None:  # or what the engine hands over would pile up
            event = events.get()
    finally:
        os.close(file)


def _write_lines(file: int, text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(file, data) :]


def _finish(events: "queue.SimpleQueue[Event | None]", thread: threading.Thread) -> None:
    events.put(None)
    if thread is not threading.current_thread():  # where garbage is collected is left to chance
        thread.join()
