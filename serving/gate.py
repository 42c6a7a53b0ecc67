"""Lets calls in while the server is ready and knows when the last of them has left.

Belongs to one event loop; every call of ours, over gRPC or HTTP, passes through it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from swiftjax.errors import EngineSilentError, NotReadyError


class Gate:
    """Closed at first. While it is closed, calls get NotReadyError with the reason."""

    def __init__(self) -> None:
        self._reason: str | None = "the model is loading; try again when the server is ready"
        self._is_shut = False
        self._is_silent = False
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def is_open(self) -> bool:
        """Whether calls are let in."""
        return self._reason is None and not self._is_silent

    @property
    def is_shut(self) -> bool:
        """Whether no call will ever be let in again."""
        return self._is_shut

    def open(self) -> None:
        """Let calls in, unless it was closed for good."""
        if not self._is_shut:
            self._reason = None

    def close(self, reason: str, *, for_good: bool) -> None:
        """Let no more calls in, for now or for good; those inside go on."""
        if not self._is_shut:  # else the first reason stays
            self._reason = reason
        self._is_shut |= for_good

    def suspend(self, is_silent: bool) -> None:
        """Let nobody in while the engine does not answer, whatever else opens and closes."""
        self._is_silent = is_silent

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Be inside for as long as the context lasts."""
        if self._reason is not None:
            raise NotReadyError(self._reason)
        if self._is_silent:
            raise EngineSilentError("the engine does not answer; try again in a while")
        self._num_inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._is_empty.set()

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until nobody is inside; false when that took longer than `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True
