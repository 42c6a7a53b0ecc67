"""The life of a server process: listen, load, serve, start a dead engine again, drain, end.

Is handed a function that makes the engine, so it knows neither checkpoints nor jax. The ports are
taken before the model is loaded: a taken port is found out at once, and health can be asked from
the start. Called by the `serve` command.
"""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable

from swiftjax.errors import SwiftJaxError
from swiftjax.garbage import spare_loaded
from swiftjax.serving.heartbeat import watch_heartbeat
from swiftjax.serving.listeners import Listen, Listeners
from swiftjax.serving.served import Served

logger = logging.getLogger(__name__)

RESTART_WINDOW = 600.0  # seconds
SECONDS_BETWEEN_TRIES = 1.0  # when a start failed, perhaps because memory was not free yet

Load = Callable[[], Awaitable[Served]]


class _StopSignals:
    """The first SIGTERM or SIGINT asks for a drain, the second ends the process at once.

    There is nothing to drain while the model loads, so then the first ends it too. SIGHUP reads
    keys and certificates again.
    """

    def __init__(self, listen: Listen) -> None:
        self._listen = listen
        self.received: signal.Signals | None = None
        self.can_drain = False
        self.arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _handle(self, number: signal.Signals) -> None:
        if self.received is not None or not self.can_drain:
            # A compilation on another thread would hold up any gentler exit.
            os._exit(128 + number)
        self.received = number
        self.arrived.set()

    def _reload(self) -> None:
        for name, part in (("API keys", self._listen.keys), ("certificate", self._listen.tls)):
            if part is None:
                continue
            try:
                part.reload()
            except (SwiftJaxError, OSError) as error:
                logger.error("SIGHUP: what there is of %s stays: %s", name, error)
            else:
                logger.warning("SIGHUP: %s read again", name)


class _Restarts:
    """How often an engine that died is started again: `limit` times within RESTART_WINDOW."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: list[float] = []

    def take(self) -> bool:
        """Whether there may be one more now, which then counts."""
        now = time.monotonic()
        self._times = [before for before in self._times if now - before < RESTART_WINDOW]
        self._times.append(now)
        return len(self._times) <= self._limit


async def run_server(
    load: Load,
    listen: Listen,
    *,
    drain_seconds: float,
    announce: Callable[[str], None],
    max_restarts: int = 0,
    max_silent_seconds: float = 0.0,
    tell: Callable[[str], None] = lambda state: None,
) -> int:
    """Serve until a signal or the end of the engine; returns the exit code of the process.

    0 after SIGTERM, 130 after SIGINT, 1 when the engine died once too often. `load` gives a warm
    engine, and another one after the first has died. No calls are let in while it does not answer
    for `max_silent_seconds`; after twice that it is killed (0: never). `announce` gets lines for
    the user when calls are taken and when that ends, `tell` the same in systemd's words.
    """
    signals = _StopSignals(listen)
    listeners = Listeners(listen)
    restarts = _Restarts(max_restarts)
    await listeners.start()
    try:
        served = await load()
        while True:
            spare_loaded()
            signals.can_drain = True
            for line in await listeners.open(served):
                announce(line)
            tell("READY=1")
            watching = asyncio.create_task(
                watch_heartbeat(served, max_silent_seconds or math.inf, listeners.suspend)
            )
            if await _wait_for_signal(signals, served, watching):
                tell("STOPPING=1")
                return await _shut_down(listeners, served, signals, drain_seconds, announce)
            announce("the engine died; the log above says why")
            signals.can_drain = False
            may_restart = not listeners.is_draining
            reason = "the engine died and is started again; try again later"
            await listeners.drain(reason, 0.0, for_good=False)
            await listeners.suspend(False)
            await served.engine.close()
            again = await _start_again(load, restarts, listeners) if may_restart else None
            if again is None:
                await listeners.drain("the engine died; restart the server", drain_seconds)
                return 1
            served = again
    finally:
        await listeners.stop()


async def _wait_for_signal(
    signals: _StopSignals, served: Served, watching: "asyncio.Task[None]"
) -> bool:
    """Wait for a signal or for the end of the engine, watched so long: False if that came first."""
    ended = asyncio.create_task(served.engine.wait_ended())
    stopped = asyncio.create_task(signals.arrived.wait())
    await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    stopped.cancel()
    watching.cancel()
    return signals.received is not None


async def _start_again(load: Load, restarts: _Restarts, listeners: Listeners) -> Served | None:
    """Load until it works or there were too many tries."""
    while restarts.take():
        listeners.count_restart()
        try:
            return await load()
        except (SwiftJaxError, OSError) as error:  # no memory for a process, say
            logger.error("the engine could not be started again: %s", error)
            await asyncio.sleep(SECONDS_BETWEEN_TRIES)
    return None


async def _shut_down(
    listeners: Listeners,
    served: Served,
    signals: _StopSignals,
    drain_seconds: float,
    announce: Callable[[str], None],
) -> int:
    assert signals.received is not None
    announce(
        f"{signals.received.name}: no new calls; waiting up to {drain_seconds:g} s for the rest"
    )
    if not await listeners.drain("the server is shutting down; use another", drain_seconds):
        logger.warning("calls still ran after %g s and were cut off", drain_seconds)
    await served.engine.close()
    return 130 if signals.received == signal.SIGINT else 0
