"""Records what a scheduler saw and decided, as JSON lines, for `swiftjax replay`.

Lines are made and written where they arise, whole ones in one call, so that no end of the process
loses or cuts one. What goes wrong ends the recording, never the engine. Made by `build_core`,
called by the engine core between its own steps.
"""

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

from swiftjax.engine.observer import Command
from swiftjax.engine.plan import Plan
from swiftjax.engine.request import Request, StepOutput
from swiftjax.engine.scheduler import Scheduler
from swiftjax.engine.trace_lines import LineMaker, Planned, make_header
from swiftjax.errors import InvalidRequestError

logger = logging.getLogger(__name__)


def check_writable(path: str | Path) -> None:
    """Raise InvalidRequestError where no trace can be written; leaves what is there."""
    os.close(_open(path, os.O_APPEND))


def _open(path: str | Path, how: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o644)
    except OSError as error:
        raise InvalidRequestError(f"cannot write the trace {path}: {error.strerror}") from error


class Tracer:
    """An Observer that writes a trace. The file closes with `close` or with the object."""

    def __init__(
        self,
        path: str | Path,
        scheduler: Scheduler,
        *,
        salt: Callable[[Request], str] = lambda request: request.options.cache_salt,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Replace the file at `path`; raises InvalidRequestError where that is not possible."""
        self._file = _open(path, os.O_TRUNC)
        self.close = weakref.finalize(self, os.close, self._file)
        self._scheduler = scheduler
        self._clock = clock
        self._num_steps = 0
        self._num_preemptions = 0
        self._unread: deque[Planned] = deque()
        self._last_read = start = clock()
        self._lines = LineMaker(start, scheduler.pool.page_size, salt)
        self._has_header = False

    def submitted(self, request: Request) -> None:
        """Note a request with the time and its place among the steps."""
        self._record(self._lines.submit, request, self._clock(), self._num_steps)

    def told_to(self, what: Command, request_id: str) -> None:
        """Note it with the time and its place among the steps."""
        self._record(self._lines.command, what, request_id, self._clock(), self._num_steps)

    def planned(self, plan: Plan, now: float) -> None:
        """Remember how full pages and queues are once the step has its pages."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        pages = (pool.num_pages - pool.num_free, pool.num_free - pool.num_idle, pool.num_idle)
        queues = (scheduler.num_running, scheduler.num_waiting, scheduler.num_preempted)
        preemptions = scheduler.num_preemptions - self._num_preemptions
        self._num_preemptions = scheduler.num_preemptions
        in_flight = any(planned.plan.work for planned in self._unread)
        number, self._num_steps = self._num_steps, self._num_steps + 1
        self._unread.append(Planned(number, plan, now, in_flight, pages, queues, preemptions))

    def read(self, plan: Plan | None, outputs: list[StepOutput]) -> None:
        """Note the step that was read, and what ended with it."""
        now = self._clock()
        while self._unread and not self._unread[0].plan.work:
            self._record(self._lines.step, self._unread.popleft(), 0.0)
        if plan is not None:
            planned = self._unread.popleft()
            took, self._last_read = now - max(planned.now, self._last_read), now
            self._record(self._lines.step, planned, took)
        for output in outputs:
            if output.finish_reason is not None:
                self._record(self._lines.finish, output, now, self._num_steps)

    def _record(self, make: Callable[..., str], *args: object) -> None:
        """Write a line; after a failure, no more."""
        if not self.close.alive:
            return
        try:
            line = make(*args)
            # The header waits for the first line: by then the engine has measured its costs.
            data = (line if self._has_header else make_header(self._scheduler) + line).encode()
            self._has_header = True
            while data:
                data = data[os.write(self._file, data) :]
        except Exception:
            logger.exception("the trace ends here")
            self.close()
