"""Threads on which texts are rendered and tokenised, away from the event loop.

Long texts have threads of their own, half as many as cores: one takes seconds, and the short ones
of everybody else would wait behind a handful of them. Called by both transports and the engine's
asyncio side.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from swiftjax.engine.tokenizer import Tokenizer

# Tokenised in less time than it takes to hand a text to a thread: 0.1 ms, 0.4 at worst.
SHORT_CHARS = 256
LONG_CHARS = 2**16  # up to a quarter of a second of a core

_long = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "swiftjax-long-texts")

Result = TypeVar("Result")


async def in_thread(num_chars: int, call: Callable[[], Result]) -> Result:
    """Call something on a thread for texts of this length."""
    threads = _long if num_chars > LONG_CHARS else None  # None: the loop's own
    return await asyncio.get_running_loop().run_in_executor(threads, call)


async def tokenise(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Tokenise as `Tokenizer.encode` does, on a thread unless the text is short."""
    call = partial(tokenizer.encode, text, add_special_tokens)
    return call() if len(text) <= SHORT_CHARS else await in_thread(len(text), call)


def count_chars(content: str | Iterable[object]) -> int:
    """Characters of a text, or of the messages of a chat; token ids have none."""
    if isinstance(content, str):
        return len(content)
    messages = (item for item in content if isinstance(item, Mapping))
    return sum(len(str(message.get("content") or "")) for message in messages)
