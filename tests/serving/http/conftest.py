"""One server of the demo model for all tests that ask one over HTTP."""

import asyncio
import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from swiftjax.build import BuiltCore, build_core
from swiftjax.config import EngineConfig
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.engine_link import ThreadLink
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.serving.keys import KeyEntry, KeyRing
from swiftjax.serving.listeners import Listen, Listeners
from swiftjax.serving.messages import describe_model
from swiftjax.serving.served import Served
from tests.serving.http.harness import DEMO_MODEL, KEY

# The demo model's own template says nothing of tools.
TOOLS_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}
Call one with <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


class Addresses(NamedTuple):
    """Two ports of one engine: with the model's own chat template, and with one for tools."""

    plain: str
    with_tools: str


@pytest.fixture(scope="package")
def addresses(demo_checkpoint: Path) -> Iterator[Addresses]:
    """A server of the demo model on an event loop of its own."""
    config = EngineConfig(
        model_path=str(demo_checkpoint),
        max_batch_size=2,
        max_model_len=256,
        max_num_batched_tokens=32,
    )
    built = build_core(config)
    ready, stop = threading.Event(), asyncio.Event()
    found: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        engine = AsyncEngine(ThreadLink(built.core), built.tokenizer, built.core.limits)
        other = copy.copy(engine)
        other.tokenizer = Tokenizer(built.tokenizer.files, chat_template=TOOLS_TEMPLATE)
        ports = [await listen(built, engine), await listen(built, other)]
        found.extend(port.http.address for port in ports if port.http is not None)
        ready.set()
        await stop.wait()
        for port in ports:
            await port.stop()
        await engine.close()

    # A daemon: the end of the tests does not wait for one that hangs.
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        assert ready.wait(60)
        yield Addresses(*found)
    finally:
        for loop in loops:
            loop.call_soon_threadsafe(stop.set)
        thread.join(30)


async def listen(built: BuiltCore, engine: AsyncEngine) -> Listeners:
    """Answer with an engine on a free port."""
    listeners = Listeners(Listen(http_port=0, keys=KeyRing(lambda: [KeyEntry(KEY)])))
    await listeners.start()
    model = describe_model(DEMO_MODEL, built.model_config, engine.limits, engine.tokenizer)
    await listeners.open(Served(engine, model))
    return listeners


@pytest.fixture(scope="package")
def address(addresses: Addresses) -> str:
    """Where the demo model is served as it is."""
    return addresses.plain
