"""Threads on which texts are rendered and tokenised, away from the event loop.

Long texts have threads of their own, half as many as cores: one takes seconds, and the short ones
of everybody else would wait behind a handful of them. Called by both transports and the engine's
asyncio side.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG_CHARS = 2**16  # up to a quarter of a second of a core

_long = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "swiftjax-long-texts")

Result = TypeVar("Result")


async def in_thread(num_chars: int, call: Callable[[], Result]) -> Result:
    """Call something on a thread for texts of this length."""
    threads = _long if num_chars > LONG_CHARS else None  # None: the loop's own
    return await asyncio.get_running_loop().run_in_executor(threads, call)


def count_chars(content: str | Iterable[object]) -> int:
    """Characters of a text, or of the messages of a chat; token ids have none."""
    if isinstance(content, str):
        return len(content)
    messages = (item for item in content if isinstance(item, Mapping))
    return sum(len(str(message.get("content") or "")) for message in messages)
