"""How many answers of one API key run or wait at a time. Knows names of keys, not the keys."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from swiftjax.engine.request import StreamOutput
from swiftjax.errors import InvalidRequestError, KeyLimitError
from swiftjax.serving.caller import current_caller


class Quota:
    """The same limit for every key; callers without one are not counted."""

    def __init__(self, limit: int, is_on: Callable[[], bool] = lambda: True) -> None:
        """`is_on` says whether there is a limit now."""
        self._limit = limit
        self._is_on = is_on
        self._num_open: Counter[str] = Counter()

    async def watch(
        self, stream: AsyncGenerator[StreamOutput, None], num_answers: int = 1
    ) -> AsyncGenerator[StreamOutput, None]:
        """Pass a stream of so many answers on, counted from its first read to its end.

        Raises KeyLimitError before the first yield where the key of the current call has too many,
        and InvalidRequestError where these alone are too many.
        """
        name = current_caller().name
        async with aclosing(stream):
            self.check_size(num_answers)
            if name and self._is_on():
                self._check(name, num_answers)
            self._num_open[name] += num_answers
            try:
                async for output in stream:
                    yield output
            finally:
                self._num_open[name] -= num_answers
                if not self._num_open[name]:
                    del self._num_open[name]

    def check_size(self, num_answers: int) -> None:
        """Raise InvalidRequestError for a call that asks for more than its key may ever have."""
        if num_answers > self._limit and current_caller().name and self._is_on():
            raise InvalidRequestError(
                f"this asks for {num_answers} answers, which are prompts times n; an API key may "
                f"have {self._limit} at a time: ask for fewer"
            )

    def _check(self, name: str, num_answers: int) -> None:
        if self._num_open[name] + num_answers > self._limit:
            raise KeyLimitError(
                f"this API key has {self._num_open[name]} answers running or waiting; "
                f"{self._limit} are the most it may have: try again when some have ended"
            )
