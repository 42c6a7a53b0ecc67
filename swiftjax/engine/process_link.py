"""The front end's end of an engine that runs in a process of its own.

`ProcessLink.start` starts the process, which may be killed, crash or run out of memory without
harm to this one: whoever waits is told at once. Belongs to one event loop, which also does all the
reading and writing. The other end is `engine_process.py`.
"""

import asyncio
import logging
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from swiftjax.engine.core import CoreStats
from swiftjax.engine.engine_link import Receiver
from swiftjax.engine.exit_status import how_it_ended
from swiftjax.engine.link_messages import (
    Abort,
    Close,
    EngineInfo,
    ForgetPrefixes,
    ForgetWeights,
    Message,
    News,
    Pause,
    Ping,
    Problem,
    ReadWeights,
    Ready,
    Resume,
    SessionOrder,
    Start,
    Submit,
    Tidings,
    UseWeights,
    WeightsDone,
)
from swiftjax.engine.request import Request
from swiftjax.engine.wire import FrameReader, to_frame
from swiftjax.errors import EngineDeadError, InvalidRequestError, SwiftJaxError
from swiftjax.memory import DeviceReport

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # for a step and the end of the process; then it is killed
HANG_UP_SECONDS = 0.5  # the same for one that hung up


class ProcessLink(asyncio.Protocol):
    """One engine process, from its start to its end."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        """Use `start` instead."""
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(Tidings)
        self._transport: asyncio.WriteTransport | None = None
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._answer: asyncio.Future[None] | None = None  # about weights
        self._receive: Receiver | None = None
        self._stats: CoreStats | None = None
        self._devices: DeviceReport | None = None
        self._is_alive = True

    @classmethod
    async def start(cls, command: Sequence[str], job: bytes) -> tuple["ProcessLink", EngineInfo]:
        """Run a command, with the number of its socket behind it, until its engine is ready.

        Must run on the main thread, whose end is the end of the process on Linux. Raises what
        building the engine raised, and SwiftJaxError when the process ended before it was done.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(process), sock=ours)
        link._send(Start(job))
        try:
            ready = await link._ready
        except BaseException:
            await asyncio.to_thread(link.close)
            raise
        return link, ready.info

    @property
    def is_alive(self) -> bool:
        """Whether the process takes orders."""
        return self._is_alive

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def connect(self, loop: asyncio.AbstractEventLoop, receive: Receiver) -> None:
        """Deliver news by calling `receive` from now on; raises InvalidRequestError elsewhere."""
        if loop is not self._loop:
            raise InvalidRequestError("an engine process serves the event loop that started it")
        self._receive = receive

    def submit(self, request: Request) -> None:
        """Send a request; stop strings and grammars are this side's, and stay here."""
        if request.generation.stop or request.grammar is not None:
            generation = replace(request.generation, stop=())
            request = replace(request, generation=generation, grammar=None)
        self._send(Submit(request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Send an abort."""
        self._send(Abort(request_id, index))

    def pause(self, request_id: str) -> None:
        """Send a pause."""
        self._send(Pause(request_id))

    def resume(self, request_id: str) -> None:
        """Send the end of a pause."""
        self._send(Resume(request_id))

    def forget_prefixes(self) -> None:
        """Send it."""
        self._send(ForgetPrefixes())

    def ping(self) -> None:
        """Ask for news, which come between two steps."""
        self._send(Ping())

    def kill(self) -> None:
        """End a process that does not answer; whoever waits is told of its end."""
        self._process.kill()
        if self._transport is not None:
            self._transport.abort()  # one that hangs in its driver would not die yet

    def order_session(self, order: SessionOrder) -> None:
        """Send it; files are read and written by the process."""
        self._send(order)

    async def read_weights(self, path: str) -> None:
        """Let the process read other weights while it works; raises what is wrong with them."""
        await self._ask(ReadWeights(path))

    async def use_weights(self) -> None:
        """Let it compute with what it read last; nobody may ask it anything meanwhile."""
        await self._ask(UseWeights())

    def forget_weights(self) -> None:
        """Let it give up what it read last, which takes as much memory as what it uses."""
        self._send(ForgetWeights())

    async def _ask(self, order: Message) -> None:
        if not self._is_alive:
            raise EngineDeadError("the engine has ended; try again later")
        self._answer = self._loop.create_future()
        self._send(order)
        await self._answer

    def stats(self) -> CoreStats:
        """Give the counts that came with the last news."""
        assert self._stats is not None, "nobody is handed a link before it is ready"
        return self._stats

    def devices(self) -> DeviceReport | None:
        """Give the last report that came."""
        return self._devices

    def close(self) -> None:
        """End the process after its current step and wait for it; from any other thread."""
        self._loop.call_soon_threadsafe(self._send, Close())
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the way to the process."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one by its methods

    def data_received(self, data: bytes) -> None:
        """Hear the process."""
        for message in self._frames.feed(data):
            match message:
                case Ready():
                    self._stats = message.stats
                    self._ready.set_result(message)
                case Problem():
                    self._ready.set_exception(message.error())
                case News():
                    self._take(message)
                case WeightsDone(problem):
                    self._settle(None if problem is None else problem.error())

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended, or will in a moment."""
        self._transport = None
        self._settle(EngineDeadError("the engine has ended; try again later"))
        if self._is_alive:
            self._is_alive = False
            # Not one of the loop's own threads: they may all be busy, and streams wait for this.
            threading.Thread(
                target=self._watch_end, name="swiftjax-engine-end", daemon=True
            ).start()

    def _watch_end(self) -> None:
        try:
            how = how_it_ended(self._process.wait(HANG_UP_SECONDS))
        except subprocess.TimeoutExpired:
            self._process.kill()
            how = "it hung up"  # `close` waits for the rest, which may be long: it frees memory
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._tell_end, how)

    def _tell_end(self, how: str) -> None:
        reason = f"its process ended: {how}"
        if not self._ready.done():
            error = SwiftJaxError(f"the engine could not be made ready; {reason}")
            self._ready.set_exception(error)
        elif self._stats is not None:  # else why it is not ready was told already
            logger.error("the engine has ended; %s", reason)
            self._take(News(self._stats, ended=reason))

    def _settle(self, error: SwiftJaxError | None) -> None:
        """Answer who waits for weights, if anybody does."""
        if self._answer is None or self._answer.done():
            return
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)

    def _send(self, order: Message) -> None:
        if self._transport is not None:
            self._transport.write(to_frame(order))

    def _take(self, news: News) -> None:
        self._stats = news.stats
        self._devices = news.devices or self._devices
        if news.ended is not None:
            self._is_alive = False
        if self._receive is not None:
            self._receive(news)
