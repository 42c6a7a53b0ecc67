"""The life of a server process: listen, load, serve, drain, end.

Is handed a function that makes the engine, so it knows neither checkpoints nor jax. The ports are
taken before the model is loaded: a taken port is found out at once, and health can be asked from
the start. Called by the `serve` command.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable

from swiftjax.errors import SwiftJaxError
from swiftjax.serving.listeners import Listen, Listeners
from swiftjax.serving.served import Served

logger = logging.getLogger(__name__)


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


async def run_server(
    load: Callable[[], Served],
    listen: Listen,
    *,
    drain_seconds: float,
    announce: Callable[[str], None],
) -> int:
    """Serve until a signal or the end of the engine; returns the exit code of the process.

    0 after SIGTERM, 130 after SIGINT, 1 when the engine died. `load` runs on a thread and returns a
    warm engine; `announce` gets lines for the user when calls are taken and when that ends.
    """
    signals = _StopSignals(listen)
    listeners = Listeners(listen)
    await listeners.start()
    try:
        served = await asyncio.to_thread(load)
        signals.can_drain = True
        for line in await listeners.open(served):
            announce(line)
        code = await _serve(listeners, served, signals, drain_seconds, announce)
        await served.engine.close()
    finally:
        await listeners.stop()
    return code


async def _serve(
    listeners: Listeners,
    served: Served,
    signals: _StopSignals,
    drain_seconds: float,
    announce: Callable[[str], None],
) -> int:
    ended = asyncio.create_task(served.engine.wait_ended())
    stopped = asyncio.create_task(signals.arrived.wait())
    await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    stopped.cancel()
    if signals.received is None:
        announce("the engine died; the log above says why")
        await listeners.drain("the engine died; restart the server", drain_seconds)
        return 1
    announce(
        f"{signals.received.name}: no new calls; waiting up to {drain_seconds:g} s for the rest"
    )
    if not await listeners.drain("the server is shutting down; use another", drain_seconds):
        logger.warning("calls still ran after %g s and were cut off", drain_seconds)
    return 130 if signals.received == signal.SIGINT else 0
