"""One server of the demo model for all tests that ask one over HTTP."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftjax.build import build_core
from swiftjax.config import EngineConfig
from swiftjax.engine.async_engine import AsyncEngine, ThreadLink
from swiftjax.serving.keys import KeyEntry, KeyRing
from swiftjax.serving.listeners import Listen, Listeners
from swiftjax.serving.messages import describe_model
from swiftjax.serving.served import Served
from tests.serving.http.harness import DEMO_MODEL, KEY


@pytest.fixture(scope="session")
def address(demo_checkpoint: Path) -> Iterator[str]:
    """A server of the demo model on an event loop of its own."""
    config = EngineConfig(
        model_path=str(demo_checkpoint),
        max_batch_size=2,
        max_model_len=256,
        max_num_batched_tokens=32,
    )
    built = build_core(config)
    ready, stop = threading.Event(), asyncio.Event()
    addresses: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        limits = built.core.limits
        engine = AsyncEngine(ThreadLink(built.core), built.tokenizer, limits)
        listeners = Listeners(Listen(http_port=0, keys=KeyRing(lambda: [KeyEntry(KEY)])))
        await listeners.start()
        model = describe_model(DEMO_MODEL, built.model_config, limits, built.tokenizer)
        await listeners.open(Served(engine, model))
        assert listeners.http is not None
        addresses.append(listeners.http.address)
        loops.append(asyncio.get_running_loop())
        ready.set()
        await stop.wait()
        await listeners.stop()
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield addresses[0]
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(30)
