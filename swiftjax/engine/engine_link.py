"""The way from an event loop to the engine and back: only frozen values cross it.

`ThreadLink` runs the engine on a thread of this process, `ProcessLink` (`process_link.py`) in a
process of its own. Called by `AsyncEngine` only.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from swiftjax.engine.core import CoreStats, EngineCore
from swiftjax.engine.engine_loop import EngineLoop
from swiftjax.engine.link_messages import (
    Abort,
    Close,
    ForgetPrefixes,
    News,
    Pause,
    Resume,
    SessionOrder,
    Submit,
)
from swiftjax.engine.request import Request
from swiftjax.memory import DeviceReport

Receiver = Callable[[News], None]


@runtime_checkable
class EngineLink(Protocol):
    """What `AsyncEngine` needs of an engine, wherever that runs."""

    @property
    def is_alive(self) -> bool:
        """Whether submitted requests will be answered; false before the last news are delivered."""
        ...

    def connect(self, loop: asyncio.AbstractEventLoop, receive: Receiver) -> None:
        """Deliver news by calling `receive` on this loop from now on."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. It is answered by step outputs or one `Refused`."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one choice; it still gets its last step output. Unknown: ignored."""
        ...

    def pause(self, request_id: str) -> None:
        """Compute nothing for a request until it is resumed or ended. Unknown: ignored."""
        ...

    def resume(self, request_id: str) -> None:
        """Go on with a paused request; any other is ignored."""
        ...

    def forget_prefixes(self) -> None:
        """Drop every cached prompt prefix before the next step."""
        ...

    def order_session(self, order: SessionOrder) -> None:
        """Queue what is to be done to a session; save and load are answered by `SessionDone`."""
        ...

    def stats(self) -> CoreStats:
        """Give the counts as of the engine's last step."""
        ...

    def devices(self) -> DeviceReport | None:
        """Give what the engine last said of its devices, at most seconds ago while it works."""
        ...

    def close(self) -> None:
        """End the engine; blocks until its step is finished."""
        ...


class ThreadLink:
    """Runs an EngineCore on one thread, which alone touches it.

    Orders take effect between steps. The news of a step reach the loop in one call.
    """

    def __init__(self, core: EngineCore, inspect: Callable[[], DeviceReport] | None = None) -> None:
        self._target: tuple[asyncio.AbstractEventLoop, Receiver] | None = None
        self._stats = core.stats()
        self._devices: DeviceReport | None = None
        self._is_alive = True
        self._loop = EngineLoop(core, self._emit, inspect)
        self._thread = threading.Thread(target=self._loop.run, name="swiftjax-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._is_alive

    def connect(self, loop: asyncio.AbstractEventLoop, receive: Receiver) -> None:
        """Deliver news by calling `receive` on this loop from now on."""
        self._target = (loop, receive)

    def submit(self, request: Request) -> None:
        """Queue a request for the engine thread."""
        self._loop.put(Submit(request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Queue an abort for the engine thread."""
        self._loop.put(Abort(request_id, index))

    def pause(self, request_id: str) -> None:
        """Queue a pause for the engine thread."""
        self._loop.put(Pause(request_id))

    def resume(self, request_id: str) -> None:
        """Queue the end of a pause for the engine thread."""
        self._loop.put(Resume(request_id))

    def forget_prefixes(self) -> None:
        """Queue it for the engine thread."""
        self._loop.put(ForgetPrefixes())

    def order_session(self, order: SessionOrder) -> None:
        """Queue it for the engine thread."""
        self._loop.put(order)

    def stats(self) -> CoreStats:
        """Give the counts that the engine thread published after its last step."""
        return self._stats

    def devices(self) -> DeviceReport | None:
        """Give the last report that came with the news of a step."""
        return self._devices

    def close(self) -> None:
        """End the thread after its current step and wait for it."""
        self._loop.put(Close())
        self._thread.join()

    def _emit(self, news: News) -> None:
        """Publish the counts and wake the loop; on the engine thread."""
        self._stats = news.stats
        self._devices = news.devices or self._devices
        if news.ended is not None:
            # First: a stream that still saw True is connected, so the last news reach it.
            self._is_alive = False
        if self._target is None:
            return
        loop, receive = self._target
        try:
            loop.call_soon_threadsafe(receive, news)
        except RuntimeError:
            if not loop.is_closed():
                raise
            # The loop's streams ended with it; nobody is left to be told.
