"""Gathers the deltas of one request until its answer is whole; for the blocking engine."""

import time

from swiftjax.engine.answers import AnswerStream
from swiftjax.engine.request import (
    Choice,
    PromptLogprobs,
    Request,
    RequestOutput,
    StepOutput,
    StreamOutput,
    Timings,
    TopLogprobs,
)
from swiftjax.engine.tokenizer import Tokenizer

# Tokens whose text is made in one go, beside a step that runs: few are left for the last one, which
# has none beside it.
PIECE = 64


class _Piece:
    """Outputs of a choice that have not ended it, joined: one by one they take ten times the room.

    So many small tuples that live on also set off collections of all garbage, 0.35 s each.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._prompt: PromptLogprobs | None = None
        self._num_cached_tokens = 0

    def add(self, output: StepOutput) -> None:
        self.token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._top_logprobs += output.top_logprobs
        self._prompt = self._prompt or output.prompt
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)

    def joined(self, like: StepOutput) -> StepOutput:
        """One output, of the request and choice of another."""
        return like._replace(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=None,
            top_logprobs=tuple(self._top_logprobs),
            prompt=self._prompt,
            num_cached_tokens=self._num_cached_tokens,
        )


class WholeAnswer:
    """The answer to one request while it grows."""

    def __init__(self, request: Request, tokenizer: Tokenizer, prompt_text: str | None) -> None:
        self.request = request
        self._stream = AnswerStream(request, tokenizer, prompt_text)
        self._deltas: list[list[StreamOutput]] = [[] for _ in range(request.generation.n)]
        self._pieces = [_Piece() for _ in range(request.generation.n)]
        self._has_stops = bool(request.generation.stop)
        self._first_token: float | None = None

    def add(self, output: StepOutput) -> StreamOutput | None:
        """Take one step's output of one choice; its last delta if that ended the choice.

        Nobody reads the text before its end, so without stop strings it is made in a few goes.
        """
        if output.token_ids and self._first_token is None:
            self._first_token = time.monotonic() - self.request.arrival_time
        has_ended, piece = output.finish_reason is not None, self._pieces[output.index]
        if not has_ended:
            piece.add(output)
            if len(piece.token_ids) < PIECE and not self._has_stops:
                return None
        self._pieces[output.index] = _Piece()
        outputs = [piece.joined(output), *((output,) if has_ended else ())]
        ended = None
        for delta in self._stream.merge(outputs):
            self._deltas[delta.index].append(delta)
            if delta.finish_reason is not None:
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
