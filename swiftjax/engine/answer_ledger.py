"""The answers of a blocking engine: growing ones, and complete ones until they are handed over.

Takes in what steps put out; knows neither the core nor who asks. Called by `swiftjax/api.py`.
"""

from collections.abc import Iterable

from swiftjax.engine.request import Prompt, Request, RequestOutput, StepOutput
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.engine.whole_answer import WholeAnswer
from swiftjax.errors import InvalidRequestError, NotFoundError


class AnswerLedger:
    """Every answer by the id of its request, each handed over once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._growing: dict[str, WholeAnswer] = {}
        self._complete: dict[str, RequestOutput] = {}

    def check_free(self, request_id: str) -> None:
        """Raise InvalidRequestError for the id of an answer that was not handed over yet."""
        if request_id in self._complete:
            raise InvalidRequestError(f"request id {request_id!r} is already in use")

    def open(self, request: Request, prompt: Prompt) -> None:
        """Expect the outputs of a request; `prompt` as the caller gave it."""
        text = prompt if isinstance(prompt, str) else None
        self._growing[request.request_id] = WholeAnswer(request, self._tokenizer, text)

    def forget(self, request_id: str) -> None:
        """Expect no more of a request."""
        del self._growing[request_id]

    def add(self, output: StepOutput) -> bool:
        """Take in an output; True if it ends a choice that the engine would go on with.

        That is a stop string, which only the text side sees.
        """
        answer = self._growing.get(output.request_id)
        if answer is None or answer.add(output) is None:
            return False
        if (whole := answer.whole()) is not None:
            del self._growing[output.request_id]
            self._complete[output.request_id] = whole
        return output.finish_reason is None

    def is_complete(self, request_id: str) -> bool:
        """Whether an answer can be had; raises NotFoundError where there is none to wait for."""
        if request_id in self._growing:
            return False
        if request_id in self._complete:
            return True
        raise NotFoundError(f"no request {request_id!r}: unknown, or its answer was handed over")

    def are_complete(self, request_ids: Iterable[str]) -> bool:
        """Whether all of these answers can be had."""
        return all(request_id in self._complete for request_id in request_ids)

    def peek(self, request_id: str) -> RequestOutput:
        """A complete answer, which stays here."""
        return self._complete[request_id]

    def take(self, request_id: str) -> RequestOutput:
        """Hand a complete answer over."""
        return self._complete.pop(request_id)

    def take_all(self) -> list[RequestOutput]:
        """Hand over all that are complete."""
        complete, self._complete = self._complete, {}
        return list(complete.values())
