"""Several engine streams as one, for requests of several prompts. Used by both transports.

Whatever ends early, every engine stream is closed, which aborts its request and frees its pages.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from swiftjax.engine.request import StreamOutput

# The most answers of one call, prompts times choices.
MAX_ANSWERS = 128

Outputs = AsyncGenerator[StreamOutput, None]
Indexed = AsyncGenerator[tuple[int, StreamOutput], None]


async def merge(streams: list[Outputs]) -> Indexed:
    """Yield what the streams yield, each with the index of its stream, as it comes."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    # Short, so that a slow reader lets the engine's own mailboxes join what arrives meanwhile.
    queue: asyncio.Queue[tuple[int, StreamOutput] | Exception | None] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: Outputs) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((index, output))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(pumps)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)
