"""The way from an event loop to the engine and back: only frozen values cross it.

`ThreadLink` runs the engine on a thread of this process. No locks and no polling: the thread blocks
on its command queue while there is nothing to compute. Called by `AsyncEngine` only.
"""

import asyncio
import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from swiftjax.engine.core import CoreStats, EngineCore
from swiftjax.engine.request import Request, StepOutput
from swiftjax.errors import SwiftJaxError

logger = logging.getLogger(__name__)


class Refused(NamedTuple):
    """The engine did not take a request."""

    request_id: str
    error: SwiftJaxError


class Abort(NamedTuple):
    """A request, or one choice of it, is to end."""

    request_id: str
    index: int | None


class Pause(NamedTuple):
    """Nothing is to be computed for a request for now."""

    request_id: str


class Resume(NamedTuple):
    """A paused request is to go on."""

    request_id: str


class ForgetPrefixes(NamedTuple):
    """No prompt is to start from cached pages that there are now."""


class Ended(NamedTuple):
    """The engine takes and answers nothing any more. Always the last event."""

    reason: str


EngineEvent = StepOutput | Refused | Ended
Receiver = Callable[[list[EngineEvent]], None]


@runtime_checkable
class EngineLink(Protocol):
    """What `AsyncEngine` needs of an engine, wherever that runs."""

    @property
    def is_alive(self) -> bool:
        """Whether submitted requests will be answered; false before `Ended` is delivered."""
        ...

    def connect(self, loop: asyncio.AbstractEventLoop, receive: Receiver) -> None:
        """Deliver events by calling `receive` on this loop from now on."""
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

    def stats(self) -> CoreStats:
        """Give the counts as of the engine's last step."""
        ...

    def close(self) -> None:
        """End the engine; blocks until its step is finished."""
        ...


Order = Request | Abort | Pause | Resume | ForgetPrefixes  # a request is to be submitted
Command = Order | None  # None: close


class ThreadLink:
    """Runs an EngineCore on one thread, which alone touches it.

    Commands take effect between steps. The events of a step reach the loop in one call.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._target: tuple[asyncio.AbstractEventLoop, Receiver] | None = None
        self._stats = core.stats()
        self._is_alive = True
        self._thread = threading.Thread(target=self._run, name="swiftjax-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._is_alive

    def connect(self, loop: asyncio.AbstractEventLoop, receive: Receiver) -> None:
        """Deliver events by calling `receive` on this loop from now on."""
        self._target = (loop, receive)

    def submit(self, request: Request) -> None:
        """Queue a request for the engine thread."""
        self._commands.put(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Queue an abort for the engine thread."""
        self._commands.put(Abort(request_id, index))

    def pause(self, request_id: str) -> None:
        """Queue a pause for the engine thread."""
        self._commands.put(Pause(request_id))

    def resume(self, request_id: str) -> None:
        """Queue the end of a pause for the engine thread."""
        self._commands.put(Resume(request_id))

    def forget_prefixes(self) -> None:
        """Queue it for the engine thread."""
        self._commands.put(ForgetPrefixes())

    def stats(self) -> CoreStats:
        """Give the counts that the engine thread published after its last step."""
        return self._stats

    def close(self) -> None:
        """End the thread after its current step and wait for it."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        reason = "closed"
        try:
            while self._run_once():
                pass
        except BaseException as error:  # whatever ends this thread must reach every open stream
            logger.exception("the engine thread died")
            reason = type(error).__name__
        # In this order: a stream that still saw True is connected, so `Ended` reaches it.
        self._is_alive = False
        self._emit([Ended(reason)])

    def _run_once(self) -> bool:
        """Take all commands, run one step, report; false when the engine is to end."""
        events: list[EngineEvent] = []
        for command in self._next_commands():
            if command is None:
                return False
            if (refused := self._obey(command)) is not None:
                events.append(refused)
        if self._core.has_work:
            events.extend(self._core.step())
        self._stats = self._core.stats()
        self._emit(events)
        return True

    def _obey(self, command: Order) -> Refused | None:
        match command:
            case Abort():
                self._core.abort(*command)
            case Pause():
                self._core.pause(command.request_id)
            case Resume():
                self._core.resume(command.request_id)
            case ForgetPrefixes():
                self._core.forget_prefixes()
            case _:
                try:
                    self._core.submit(command)
                except SwiftJaxError as error:
                    return Refused(command.request_id, error)
        return None

    def _next_commands(self) -> list[Command]:
        """All commands there are; waits for the first while there is nothing to compute."""
        wait = self._core.seconds_to_work()
        if not self._core.has_work:
            self._core.check_while_idle()
        commands: list[Command] = []
        try:
            if wait > 0:
                # Longer than this the clock of the operating system cannot be asked to wait.
                timeout = None if math.isinf(wait) else min(wait, threading.TIMEOUT_MAX)
                commands.append(self._commands.get(timeout=timeout))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _emit(self, events: list[EngineEvent]) -> None:
        if not events or self._target is None:
            return
        loop, receive = self._target
        try:
            loop.call_soon_threadsafe(receive, events)
        except RuntimeError:
            if not loop.is_closed():
                raise
            # The loop's streams ended with it; nobody is left to be told.
