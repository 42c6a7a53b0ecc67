"""The loop that steps a core: takes orders between steps and tells what came of them.

No locks and no polling: the thread that runs it blocks on its orders while there is nothing to
compute. Run by a thread of the caller's process (`ThreadLink`) or by a process of its own
(`engine_process.py`), which say where the news go.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from swiftjax.engine.core import EngineCore
from swiftjax.engine.link_messages import (
    Abort,
    Close,
    ForgetPrefixes,
    News,
    Order,
    Pause,
    Ping,
    Problem,
    Refused,
    Resume,
    SessionOrder,
    Submit,
)
from swiftjax.engine.request import StepOutput
from swiftjax.engine.session_orders import SessionDesk
from swiftjax.engine.step_meter import StepMeter
from swiftjax.errors import SwiftJaxError
from swiftjax.memory import DeviceReport

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_DEVICE_REPORTS = 1.0

Errand = Callable[[EngineCore], None]


class EngineLoop:
    """Owns a core that has not been stepped yet; only the thread in `run` touches it."""

    def __init__(
        self,
        core: EngineCore,
        emit: Callable[[News], None],
        inspect: Callable[[], DeviceReport] | None = None,
    ) -> None:
        """`emit` must be quick: the next step waits for it. `inspect` asks the devices."""
        self._core = core
        self._emit = emit
        self._inspect = inspect
        self._next_inspection = -math.inf
        self._orders: queue.SimpleQueue[Order | Refused | Errand] = queue.SimpleQueue()
        self._sessions = SessionDesk(
            core.sessions,
            lambda do: self.put(lambda core: do()),
            lambda done: self._emit(News(self._last_stats, sessions=[done])),
        )
        self._meter = StepMeter()
        self._last_stats = core.stats()
        core.add_observer(self._meter)

    def put(self, order: Order | Refused | Errand) -> None:
        """Queue an order, from any thread; a refusal made elsewhere is passed on in its turn.

        An errand is run with the core, between two steps; what it raises ends the engine.
        """
        self._orders.put(order)

    def run(self) -> bool:
        """Step until told to close; False when something broke. The last news says so."""
        reason = "closed"
        try:
            self._tell([], [])
            while self._run_once():
                pass
        except BaseException as error:  # whatever ends this must reach every open stream
            logger.exception("the engine died")
            reason = type(error).__name__
        self._emit(News(self._last_stats, ended=reason))
        return reason == "closed"

    def _run_once(self) -> bool:
        """Take all orders, run one step, tell; False when the engine is to end."""
        refused: list[Refused] = []
        for order in self._next_orders():
            if isinstance(order, Close):
                return False
            if isinstance(order, SessionOrder):
                self._sessions.obey(order)
            elif (refusal := self._obey(order)) is not None:
                refused.append(refusal)
        if refused:
            self._tell([], refused)  # now: who is turned away must not wait for a step
        self._tell(self._core.step() if self._core.has_work else [], [])
        return True

    def _obey(self, order: Order | Refused | Errand) -> Refused | None:
        match order:
            case Submit(request):
                try:
                    self._core.submit(request)
                except SwiftJaxError as error:
                    return Refused(request.request_id, Problem.of(error))
            case Abort(request_id, index):
                self._core.abort(request_id, index)
            case Pause(request_id):
                self._core.pause(request_id)
            case Resume(request_id):
                self._core.resume(request_id)
            case ForgetPrefixes():
                self._core.forget_prefixes()
            case Ping():
                self._emit(News(self._last_stats))
            case Refused():
                return order
            case _ if callable(order):
                order(self._core)
        return None

    def _next_orders(self) -> list[Order | Refused | Errand]:
        """All orders there are; waits for the first while there is nothing to compute."""
        wait = self._core.seconds_to_work()
        if not self._core.has_work:
            self._core.check_while_idle()
        orders: list[Order | Refused | Errand] = []
        try:
            if wait > 0:
                # Longer than this the clock of the operating system cannot be asked to wait.
                timeout = None if math.isinf(wait) else min(wait, threading.TIMEOUT_MAX)
                orders.append(self._orders.get(timeout=timeout))
            while True:
                orders.append(self._orders.get_nowait())
        except queue.Empty:
            return orders

    def _tell(self, outputs: list[StepOutput], refused: list[Refused]) -> None:
        stats, report, devices = self._core.stats(), self._meter.take(), self._look_at_devices()
        if outputs or refused or report or devices or stats != self._last_stats:
            self._last_stats = stats
            self._emit(News(stats, outputs, refused, report, devices))

    def _look_at_devices(self) -> DeviceReport | None:
        now = time.monotonic()
        if self._inspect is None or now < self._next_inspection:
            return None
        self._next_inspection = now + SECONDS_BETWEEN_DEVICE_REPORTS
        return self._inspect()
