"""When messages are written: the messages of one step together, after all of them were made.

A step of the engine brings something for every stream, each of which has a task. If each made its
message and wrote it, making one would begin with caches full of the network's work: both take half
as long again, and a connection that has many streams sends many small packets. Used by all
handlers that stream.
"""

import asyncio


async def until_all_are_made() -> None:
    """Let the streams that have something new make their messages."""
    await asyncio.sleep(0)
