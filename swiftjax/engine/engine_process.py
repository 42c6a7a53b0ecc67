"""The engine's end of a `ProcessLink`: a process that runs one engine for one front end.

The main thread builds the engine and runs its loop, a second one reads orders, a third compiles
grammars, so that none of them holds up a step. Ends when its front end does, whatever ended that.
Called by the programs that a front end starts; knows neither checkpoints nor jax.
"""

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

from swiftjax.engine.core import EngineCore
from swiftjax.engine.engine_loop import EngineLoop
from swiftjax.engine.grammar import GrammarCompiler
from swiftjax.engine.link_messages import (
    Abort,
    EngineInfo,
    ForgetWeights,
    Order,
    Pause,
    Problem,
    ReadWeights,
    Ready,
    Refused,
    Resume,
    Start,
    Submit,
    WeightOrder,
    WeightsDone,
)
from swiftjax.engine.wire import FrameReader, Outbox
from swiftjax.errors import CheckpointError, SwiftJaxError, UnsupportedError
from swiftjax.memory import DeviceReport

logger = logging.getLogger(__name__)

READ_BYTES = 2**18
LAST_WORD_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


@runtime_checkable
class Weights(Protocol):
    """Those of one engine, which may be changed."""

    def read(self, path: str) -> None:
        """Read others of the same shapes; raises SwiftJaxError for what does not fit."""
        ...

    def use(self) -> None:
        """Put what was read last in the place of those in use; no step runs."""
        ...

    def forget(self) -> None:
        """Give up what was read last."""
        ...


class BuiltEngine(NamedTuple):
    """A warm engine and what goes with it."""

    core: EngineCore
    info: EngineInfo
    inspect: Callable[[], DeviceReport] | None = None
    weights: Weights | None = None


def run_engine_process(file: int, build: Callable[[bytes], BuiltEngine]) -> int:
    """Serve the front end at the other end of a socket; returns the exit code.

    `build` gets what the front end sent along with `Start`. What it raises on purpose is told to
    the front end, and so is the end of the engine.
    """
    _end_with_parent()
    sock = socket.socket(fileno=file)
    orders = _Orders(sock)
    outbox = Outbox(sock)
    try:
        engine = build(orders.wait_for_start().job)
    except SwiftJaxError as error:
        outbox.send(Problem.of(error))
        outbox.drain(LAST_WORD_SECONDS)
        return 1
    loop = EngineLoop(engine.core, outbox.send, engine.inspect)
    orders.deliver_to(loop, engine.info, WeightDesk(engine.weights, loop, outbox))
    outbox.send(Ready(engine.info, engine.core.stats()))
    is_well = loop.run()
    outbox.drain(LAST_WORD_SECONDS)
    return 0 if is_well else 1


def _end_with_parent() -> None:
    """A front end that is killed takes its engine along; signals are the front end's to handle."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere the end of the socket is noticed between two calls
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class WeightDesk:
    """Reads other weights on a thread of its own, and has the loop use them."""

    def __init__(self, weights: Weights | None, loop: EngineLoop, outbox: Outbox) -> None:
        self._weights = weights
        self._loop = loop
        self._outbox = outbox
        self._reader = ThreadPoolExecutor(1, "swiftjax-weights")

    def take(self, order: WeightOrder) -> None:
        """Obey, and answer when it is done."""
        if isinstance(order, ReadWeights):
            self._reader.submit(self._read, order.path)
        elif isinstance(order, ForgetWeights):
            assert self._weights is not None, "ordered before anything was read"
            self._reader.submit(self._weights.forget)
        else:
            self._loop.put(self._use)

    def _read(self, path: str) -> None:
        try:
            if self._weights is None:
                raise UnsupportedError("the weights of this engine cannot be changed")
            self._weights.read(path)
        except SwiftJaxError as error:
            self._outbox.send(WeightsDone(Problem.of(error)))
        except Exception as error:
            logger.exception("weights could not be read")
            problem = CheckpointError(f"{path} cannot be read: {type(error).__name__}")
            self._outbox.send(WeightsDone(Problem.of(problem)))
        else:
            self._outbox.send(WeightsDone())

    def _use(self, core: EngineCore) -> None:
        if core.has_work:  # the last steps of requests that were aborted
            self._loop.put(self._use)
            return
        assert self._weights is not None, "asked for before anything was read"
        self._weights.use()
        core.forget_pages()
        self._outbox.send(WeightsDone())


class _Orders:
    """Reads orders on a thread of its own, from the start, so that a front end's end is noticed."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._start: queue.SimpleQueue[Start] = queue.SimpleQueue()
        self._loop: EngineLoop | None = None
        self._grammars: GrammarCompiler | None = None
        self._weights: WeightDesk | None = None
        self._compiler = ThreadPoolExecutor(1, "swiftjax-grammars")
        self._compiling: set[str] = set()
        threading.Thread(target=self._read, name="swiftjax-orders", daemon=True).start()

    def wait_for_start(self) -> Start:
        """Block until the front end has said what to build."""
        return self._start.get()

    def deliver_to(self, loop: EngineLoop, info: EngineInfo, weights: WeightDesk) -> None:
        """Name who takes the orders; the front end sends none before it was told Ready."""
        limits = info.limits
        self._grammars = GrammarCompiler(
            info.tokenizer_files.tokenizer_json, limits.vocab_size, limits.eos_token_ids
        )
        self._weights = weights
        self._loop = loop

    def _read(self) -> None:
        try:
            frames = FrameReader(Start | Order | WeightOrder)
            while data := self._socket.recv(READ_BYTES):
                for message in frames.feed(data):
                    self._take(message)
        except Exception:
            logger.exception("the engine process cannot read its orders")
        finally:
            os._exit(1)  # the front end is gone; what the engine still does is for nobody

    def _take(self, message: Start | Order | WeightOrder) -> None:
        if isinstance(message, Start):
            self._start.put(message)
        elif self._loop is None:
            os._exit(0)  # closed while it loads: nothing is lost
        elif isinstance(message, WeightOrder):
            assert self._weights is not None, "set before the loop"
            self._weights.take(message)
        elif isinstance(message, Submit) and message.request.generation.constraint is not None:
            self._compiling.add(message.request.request_id)
            self._compiler.submit(self._compile, self._loop, message)
        elif isinstance(message, Abort | Pause | Resume) and message.request_id in self._compiling:
            self._compiler.submit(self._loop.put, message)  # behind its request
        else:
            self._loop.put(message)

    def _compile(self, loop: EngineLoop, order: Submit) -> None:
        request, constraint = order.request, order.request.generation.constraint
        assert constraint is not None and self._grammars is not None
        try:
            loop.put(Submit(replace(request, grammar=self._grammars.compile(constraint))))
        except SwiftJaxError as error:
            loop.put(Refused(request.request_id, Problem.of(error)))
        except Exception as error:  # a bug, of which whoever waits for the answer must hear
            logger.exception("a constraint could not be compiled")
            bug = SwiftJaxError(f"a constraint could not be compiled: {type(error).__name__}")
            loop.put(Refused(request.request_id, Problem.of(bug)))
        finally:
            self._compiling.discard(request.request_id)
