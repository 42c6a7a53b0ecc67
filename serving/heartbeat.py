"""Notices an engine process that lives but does not answer: calls are refused, then it is killed.

It is asked every second, whether it works or not, and answers between two steps; so what is long is
no step but many, a prompt of any length say, is never taken for silence. Run by `server.py`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swiftjax.serving.served import Served

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_PINGS = 1.0
PATIENCE = 2  # killed after so many times the seconds after which calls are refused


async def watch_heartbeat(
    served: Served, seconds: float, suspend: Callable[[bool], Awaitable[None]]
) -> None:
    """Ask an engine for as long as it answers, and return when it was killed.

    `suspend` is told when it has been silent for `seconds`, and when it has found its voice again.
    Silence is counted in the turns of this loop, so that time for which this process did not run
    either does not count.
    """
    if served.pulse is None or served.watch is None:
        return
    pause = min(SECONDS_BETWEEN_PINGS, seconds / 4)
    silent, last_sign = 0.0, served.watch.last_sign
    while silent < PATIENCE * seconds:
        served.pulse.ping()
        await asyncio.sleep(pause)
        was_suspended = silent >= seconds
        is_silent = served.watch.last_sign == last_sign
        silent, last_sign = silent + pause if is_silent else 0.0, served.watch.last_sign
        if (silent >= seconds) != was_suspended:
            await suspend(not was_suspended)
            done = "answers again" if was_suspended else f"has not answered for {seconds:g} s"
            logger.warning("the engine %s", done)
    logger.error("the engine has not answered for %g s and is killed", PATIENCE * seconds)
    served.pulse.kill()
