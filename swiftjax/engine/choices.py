"""The `n` choices of a request as requests of their own, and their outputs as those of one.

The scheduler sees single sequences only; clients see one request id and an index. Held by the
engine core.
"""

import hashlib
from dataclasses import replace

from swiftjax.engine.request import Request, StepOutput
from swiftjax.errors import InvalidRequestError


class ChoiceTable:
    """Which running sequences belong to requests with n > 1."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, int]] = {}  # id of a choice -> id and index
        self._open: dict[str, dict[int, str]] = {}  # request id -> the choices that run

    def split(self, request: Request) -> list[Request]:
        """The request itself, or its choices; raises InvalidRequestError for an id in use."""
        request_id = request.request_id
        if request_id in self._open:
            raise InvalidRequestError(f"request id {request_id!r} is already in use")
        if request.generation.n == 1:
            return [request]
        choices = [_choice(request, index) for index in range(request.generation.n)]
        self._open[request_id] = {i: choice.request_id for i, choice in enumerate(choices)}
        for index, choice in enumerate(choices):
            self._owners[choice.request_id] = (request_id, index)
        return choices

    def ids_of(self, request_id: str, index: int | None = None) -> list[str]:
        """The scheduler's ids of a request: of one choice, or of all that run."""
        choices = self._open.get(request_id)
        if choices is None:
            return [request_id]
        return [own for i, own in choices.items() if index in (None, i)]

    def join(self, output: StepOutput) -> StepOutput:
        """The output as one of the request that was submitted."""
        owner = self._owners.get(output.request_id)
        if owner is None:
            return output
        if output.finish_reason is not None:
            self.forget(output.request_id)
        return output._replace(request_id=owner[0], index=owner[1])

    def forget(self, choice_id: str) -> None:
        """A choice has ended, or never began."""
        request_id, index = self._owners.pop(choice_id)
        del self._open[request_id][index]
        if not self._open[request_id]:
            del self._open[request_id]


def _choice(request: Request, index: int) -> Request:
    # The prompt is scored once: the other choices fork from its pages.
    asked = request.generation.prompt_logprobs if index == 0 else None
    generation = replace(request.generation, echo=False, n=1, prompt_logprobs=asked)
    return replace(
        request,
        request_id=f"{request.request_id}/{index}",
        generation=generation,
        seed=derive_seed(request.seed, index),
        fork_of=f"{request.request_id}/0" if index else None,
    )


def derive_seed(seed: int, index: int) -> int:
    """The seed of a choice; the first keeps the request's own."""
    if index == 0:
        return seed
    words = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "little")
