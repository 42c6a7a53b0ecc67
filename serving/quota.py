"""How many requests of one API key run or wait at a time. Knows names of keys, not the keys."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from swiftjax.engine.request import StreamOutput
from swiftjax.errors import KeyLimitError
from swiftjax.serving.caller import current_caller


class Quota:
    """The same limit for every key; callers without one are not counted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_open: Counter[str] = Counter()

    async def watch(
        self, stream: AsyncGenerator[StreamOutput, None]
    ) -> AsyncGenerator[StreamOutput, None]:
        """Pass a stream on, counted from its first read to its end.

        Raises KeyLimitError before the first yield where the key of the current call has too many.
        """
        name = current_caller().name
        async with aclosing(stream):
            if name and self._num_open[name] >= self._limit:
                raise KeyLimitError(
                    f"this API key has {self._limit} requests running or waiting, which is the "
                    "most it may have: try again when one has ended"
                )
            self._num_open[name] += 1
            try:
                async for output in stream:
                    yield output
            finally:
                self._num_open[name] -= 1
                if not self._num_open[name]:
                    del self._num_open[name]
