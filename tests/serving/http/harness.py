"""The HTTP and gRPC listeners of one server in this process, over the byte vocabulary."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2

from swiftjax.config import ReaderLimits
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.core import EngineCore
from swiftjax.memory import DeviceMemory, DeviceReport
from swiftjax.serving.engine_watch import EngineWatch
from swiftjax.serving.keys import KeyEntry, KeyRing
from swiftjax.serving.listeners import Listen, Listeners
from swiftjax.serving.messages import describe_model
from swiftjax.serving.served import Served
from swiftjax.serving.session_files import SessionFiles
from tests.fakes import FakeRunner
from tests.serving.harness import MODEL, make_core, make_engine

Json = dict[str, Any]
DEMO_MODEL = "smollm2-135m"
KEY, ADMIN_KEY = "key-of-a-user", "key-of-an-admin"


@dataclass
class HttpService:
    """A server that answers, and a client of it that sends the key."""

    core: EngineCore
    engine: AsyncEngine
    listeners: Listeners
    client: httpx2.AsyncClient

    @property
    def num_steps(self) -> int:
        """Steps computed so far."""
        return len(cast(FakeRunner, self.core._runner).batches)

    def is_idle(self) -> bool:
        """Whether nothing runs or waits and every page is free."""
        stats = self.engine.stats()
        no_requests = stats.num_running == 0 and stats.num_waiting == 0
        return no_requests and stats.num_free_pages == stats.num_pages

    async def post(self, path: str, body: object) -> Json:
        """The answer to a request that must succeed."""
        headers = {"content-type": "application/json"}
        response = await self.client.post(path, content=json.dumps(body), headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path: str, body: object, status: int = 400) -> Json:
        """The error of a request that must be refused with a status and in OpenAI's form."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        response = await self.client.post(path, content=content, headers=headers)
        assert response.status_code == status, (body, response.text)
        return error_of(response)

    async def events(self, path: str, body: Json) -> list[Json]:
        """The chunks of a streamed answer, whose framing is checked."""
        async with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            text = (await response.aread()).decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_events(text)


def usage_of(prompt: int, output: int) -> Json:
    """The usage of a request whose prompt was not cached."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def read_events(text: str) -> list[Json]:
    """The chunks of an event stream that must end with [DONE]."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response: httpx2.Response) -> Json:
    """The error object, which names no class or path of ours."""
    [error] = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    for word in ("Traceback", "swiftjax/", "msgspec", ".py"):
        assert word not in response.text
    return error


def make_keys(*entries: KeyEntry) -> KeyRing:
    """A ring of these keys."""
    return KeyRing(lambda: entries)


@asynccontextmanager
async def serving(
    core: EngineCore,
    *,
    keys: KeyRing | None = None,
    allowed_origins: tuple[str, ...] = (),
    readers: ReaderLimits | None = None,
    session_folder: Path | None = None,
) -> AsyncIterator[HttpService]:
    """Run a server on free ports."""
    watch = EngineWatch()
    devices = DeviceReport(0, 0.0, (DeviceMemory("gpu:0", 3, 10), DeviceMemory("gpu:1", 4, 10)))
    engine = make_engine(core, readers, watch.take, devices)
    keys = keys or KeyRing()
    listeners = Listeners(Listen(http_port=0, keys=keys, allowed_origins=allowed_origins))
    await listeners.start()
    model = describe_model("bytes", MODEL, core.limits, engine.tokenizer)
    await listeners.open(
        Served(engine, model, watch, session_folder and SessionFiles(session_folder))
    )
    assert listeners.http is not None
    headers = {} if keys.is_open else {"authorization": f"Bearer {KEY}"}
    try:
        async with httpx2.AsyncClient(
            base_url=listeners.http.address, headers=headers, timeout=30, trust_env=False
        ) as client:
            yield HttpService(core, engine, listeners, client)
    finally:
        await listeners.stop()
        await engine.close()
        if not core.has_work:
            core.scheduler.check_integrity()


def run(
    body: Callable[[HttpService], Awaitable[None]],
    *,
    keys: KeyRing | None = None,
    allowed_origins: tuple[str, ...] = (),
    **core: Any,
) -> None:
    """Run a test against a fresh server."""

    async def main() -> None:
        async with serving(
            make_core(**core), keys=keys, allowed_origins=allowed_origins
        ) as service:
            await body(service)

    asyncio.run(main())
