"""What the engine said to one stream and the stream has not read yet: bounded in size and time.

A reader that falls behind has its own request paused, and aborted when it stays away; the engine
and all other streams go on. Lives on the event loop; made and filled by `AsyncEngine`.
"""

import asyncio
import logging
import time

from swiftjax.config import ReaderLimits
from swiftjax.engine.engine_link import EngineLink
from swiftjax.engine.request import Request, StepOutput
from swiftjax.engine.served_tokens import owner_of
from swiftjax.engine.session import Turn
from swiftjax.errors import SwiftJaxError

logger = logging.getLogger(__name__)


class Mailbox:
    """The unread outputs of one request."""

    def __init__(
        self, request: Request, link: EngineLink, limits: ReaderLimits, turn: Turn | None = None
    ) -> None:
        """`turn` is told what the engine says whether or not anybody reads it."""
        self._turn = turn
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.owner = owner_of(request.options.client_id)
        self._request_id = request.request_id
        self._num_open = request.generation.n  # choices of which the engine may still speak
        self._link = link
        self._limits = limits
        streaming = request.generation.streaming
        self._max_unread = streaming.buffer if streaming else limits.max_unread_tokens
        self._outputs: list[StepOutput] = []
        self._num_unread = 0  # tokens
        self._error: SwiftJaxError | None = None
        self._is_open = True
        self._reader: asyncio.Future[None] | None = None  # waits for what is new
        self._pause: asyncio.TimerHandle | None = None  # runs while the request is paused
        self._expiry = None if request.deadline is None else self._watch(request, request.deadline)

    @property
    def engine_is_done(self) -> bool:
        """Whether the engine has said its last word on the request."""
        return self._num_open == 0

    def put(self, output: StepOutput) -> None:
        """Take what the engine says; pause the request when that gets too much."""
        if self._turn is not None:
            self._turn.record(output)
        self._put(output)
        if output.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                self._end_pause()  # the id may soon name another request
                return
        if self._num_unread > self._max_unread and self._is_open and self._pause is None:
            self._link.pause(self._request_id)
            self._pause = asyncio.get_running_loop().call_later(
                self._limits.max_paused_seconds, self._give_up
            )

    def fail(self, error: SwiftJaxError) -> None:
        """Let the reader raise this; nothing else will come."""
        self._num_open = 0
        if self._turn is not None:
            self._turn.fall_silent()
        self._end_pause()
        self._error = error
        self._wake()

    async def take(self) -> list[StepOutput]:
        """Give all unread outputs, at least one; for one reader."""
        if not self._outputs and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        outputs, self._outputs, self._num_unread = self._outputs, [], 0
        if self._end_pause():
            self._link.resume(self._request_id)
        return outputs

    def close(self) -> None:
        """Nobody will read on."""
        self._is_open = False
        self._end_pause()
        if self._expiry is not None:
            self._expiry.cancel()

    def _end_pause(self) -> bool:
        """Stop counting the time of a pause; whether there was one."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.cancel()
        return pause is not None

    def _give_up(self) -> None:
        seconds = self._limits.max_paused_seconds
        logger.info("aborted %r: its client read nothing for %g s", self._request_id, seconds)
        self._link.abort(self._request_id)

    def _watch(self, request: Request, deadline: float) -> asyncio.TimerHandle:
        """Let the stream end in time: the engine watches deadlines only between its steps."""
        expired = [
            StepOutput(request.request_id, (), (), "time_limit", index=index)
            for index in range(request.generation.n)
        ]
        delay = deadline - time.monotonic()
        return asyncio.get_running_loop().call_later(delay, self._expire, expired)

    def _expire(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self._put(output)

    def _put(self, output: StepOutput) -> None:
        if self._is_open:
            self._outputs.append(output)
            self._num_unread += len(output.token_ids)
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
