"""Threads on which texts are rendered and tokenised and grammars compiled, off the event loop.

Long texts have threads of their own, half as many as cores: one takes seconds, and the short ones
of everybody else would wait behind a handful of them. Of either kind of threads one API key has
half, so that others need not wait for all that it asks. A thread cannot be stopped: who gives up
has it until it is done. Called by both transports and the engine's asyncio side.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from swiftjax.engine.tokenizer import Tokenizer

# Tokenised in less time than it takes to hand a text to a thread: 0.1 ms, 0.4 at worst.
SHORT_CHARS = 256
LONG_CHARS = 2**16  # up to a quarter of a second of a core

CHARS_PER_ID = 4  # of a text that is made of token ids

_NO_TEXT = (int, float, type(None))  # of what JSON can hold

NUM_CORES = os.cpu_count() or 1
NUM_LONG = max(1, NUM_CORES // 2)
NUM_SHORT = min(32, NUM_CORES + 4)

_long = ThreadPoolExecutor(NUM_LONG, "swiftjax-long-texts")
_short = ThreadPoolExecutor(NUM_SHORT, "swiftjax-short-texts")
_owner: ContextVar[str] = ContextVar("owner of texts", default="")
# By event loop, owner and whether for long texts, while they are used.
_Key = tuple[asyncio.AbstractEventLoop, str, bool]
_turns: WeakValueDictionary[_Key, asyncio.Semaphore] = WeakValueDictionary()

Result = TypeVar("Result")


def set_owner(name: str) -> None:
    """Say whose texts the current task works on; nobody's, which is the default, have no share."""
    _owner.set(name)


async def in_thread(num_chars: int, call: Callable[[], Result]) -> Result:
    """Call something on a thread for texts of this length."""
    loop, owner, is_long = asyncio.get_running_loop(), _owner.get(), num_chars > LONG_CHARS
    threads = _long if is_long else _short
    if not owner:
        return await loop.run_in_executor(threads, call)
    turns = _turns.setdefault((loop, owner, is_long), asyncio.Semaphore(share_of(is_long)))

    def give_back(done: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(turns.release)

    await turns.acquire()
    future = threads.submit(call)
    future.add_done_callback(give_back)
    return await asyncio.wrap_future(future)


def share_of(is_long: bool) -> int:
    """How many threads for long or for short texts one owner may have."""
    return max(1, (NUM_LONG if is_long else NUM_SHORT) // 2)


async def tokenise(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Tokenise as `Tokenizer.encode` does, on a thread unless the text is short."""
    call = partial(tokenizer.encode, text, add_special_tokens)
    return call() if len(text) <= SHORT_CHARS else await in_thread(len(text), call)


def count_chars(content: object) -> int:
    """Characters of a text, or of all that is in the messages of a chat; token ids have none.

    Counts no further than to know that it is long: all that is left has one at least.
    """
    num_chars, rest = 0, [content]
    # Not by recursion: clients nest as deeply as they like.
    while rest and num_chars + len(rest) <= LONG_CHARS:
        item = rest.pop()
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, list | tuple):
            rest += [part for part in item if not isinstance(part, _NO_TEXT)]
        elif isinstance(item, dict | Mapping):  # the first is found out sooner
            parts = (*item.keys(), *item.values())
            rest += [part for part in parts if not isinstance(part, _NO_TEXT)]
    return num_chars + len(rest)
