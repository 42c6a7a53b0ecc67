"""One answer while it is read: what the engine says of it becomes what a client gets.

Made by `AsyncEngine` for every request that it submits. Knows neither links nor transports beyond
the abort that it may owe.
"""

from swiftjax.engine.answers import AnswerStream
from swiftjax.engine.engine_link import EngineLink
from swiftjax.engine.mailbox import Mailbox
from swiftjax.engine.request import Request, StreamOutput
from swiftjax.errors import DeadlineError


class AnswerReader:
    """Reads one request's mailbox; must be closed, which aborts what is left of the request."""

    def __init__(
        self,
        answer: AnswerStream,
        request: Request,
        mailbox: Mailbox,
        link: EngineLink,
        timeout: float | None,
    ) -> None:
        """`timeout` is the caller's, in seconds; the request may have a limit of its own."""
        self._answer = answer
        self._request_id = request.request_id
        self._has_choices = request.generation.n > 1
        self._mailbox = mailbox
        self._link = link
        limit = request.options.time_limit
        comes_first = timeout is not None and (limit is None or timeout <= limit)
        self._timeout = timeout if comes_first else None  # the request's own limit is no error

    @property
    def is_done(self) -> bool:
        """Whether the answer is whole."""
        return self._answer.is_done

    async def take(self) -> list[StreamOutput]:
        """Wait for what is new and give it, choice by choice.

        Raises what the engine refused the request for, and DeadlineError after the timeout.
        """
        outputs = self._answer.merge(await self._mailbox.take())
        for output in outputs:
            if output.finish_reason is not None:
                self._end(output)
        return outputs

    def close(self) -> None:
        """Read no more."""
        self._mailbox.close()
        if not self._mailbox.engine_is_done:
            self._link.abort(self._request_id)

    def _end(self, output: StreamOutput) -> None:
        if output.finish_reason == "time_limit" and self._timeout is not None:
            raise DeadlineError(f"the deadline of {self._timeout:g} s has passed")
        is_stopped = output.finish_reason == "stop" and self._has_choices
        if is_stopped and not self._mailbox.engine_is_done:  # else another may have the id
            # Of a stop string only this side knows; other choices go on.
            self._link.abort(self._request_id, output.index)
