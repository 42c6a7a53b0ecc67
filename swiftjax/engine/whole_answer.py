"""Gathers the deltas of one request until its answer is whole; for the blocking engine."""

import time

from swiftjax.engine.answers import AnswerStream
from swiftjax.engine.request import (
    Choice,
    Request,
    RequestOutput,
    StepOutput,
    StreamOutput,
    Timings,
)
from swiftjax.engine.tokenizer import Tokenizer

MAX_UNREAD = 1024  # outputs; they take many times the room of their tokens


class WholeAnswer:
    """The answer to one request while it grows."""

    def __init__(self, request: Request, tokenizer: Tokenizer, prompt_text: str | None) -> None:
        self.request = request
        self._stream = AnswerStream(request, tokenizer, prompt_text)
        self._deltas: list[list[StreamOutput]] = [[] for _ in range(request.generation.n)]
        self._unread: list[StepOutput] = []
        self._has_stops = bool(request.generation.stop)
        self._first_token: float | None = None

    def add(self, output: StepOutput) -> StreamOutput | None:
        """Take one step's output of one choice; its last delta if that ended the choice.

        Nobody reads the text before its end, so without stop strings it is made in a few goes.
        """
        if output.token_ids and self._first_token is None:
            self._first_token = time.monotonic() - self.request.arrival_time
        self._unread.append(output)
        may_wait = len(self._unread) < MAX_UNREAD and not self._has_stops
        if output.finish_reason is None and may_wait:
            return None
        outputs, self._unread = self._unread, []
        ended = None
        for delta in self._stream.merge(outputs):
            self._deltas[delta.index].append(delta)
            if delta.index == output.index and delta.finish_reason is not None:
                ended = delta
        return ended

    def whole(self) -> RequestOutput | None:
        """The whole answer, once all its choices have ended."""
        if not self._stream.is_done:
            return None
        total = time.monotonic() - self.request.arrival_time
        prompts = [d.prompt for d in self._deltas[0] if d.prompt is not None]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            choices=tuple(_join(deltas) for deltas in self._deltas),
            timings=Timings(first_token=self._first_token, total=total),
            prompt=prompts[0] if prompts else None,
            num_cached_tokens=self._deltas[0][-1].num_cached_tokens,
        )


def _join(deltas: list[StreamOutput]) -> Choice:
    reason = deltas[-1].finish_reason
    assert reason is not None
    return Choice(
        index=deltas[0].index,
        text="".join(d.text for d in deltas),
        token_ids=tuple(i for d in deltas for i in d.token_ids),
        logprobs=tuple(p for d in deltas for p in d.logprobs),
        top_logprobs=tuple(top for d in deltas for top in d.top_logprobs),
        finish_reason=reason,
    )
