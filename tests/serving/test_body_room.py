"""Large requests, however many connections send them: bounded in memory over both protocols."""

import asyncio
import contextvars

import grpc
import pytest

from swiftjax.errors import KeyLimitError, QueueFullError
from swiftjax.serving import body_room
from swiftjax.serving.body_room import BodyRoom
from swiftjax.serving.caller import Caller, set_caller
from swiftjax.serving.proto import swiftjax_pb2 as pb
from tests.serving.harness import LONG_TEXT, make_core, status_of, until
from tests.serving.harness import serving as serving_grpc
from tests.serving.http.harness import error_of, serving


def test_what_is_held_is_given_back_whatever_happens() -> None:
    room = BodyRoom(10)
    with room.holding(4) as held:
        held.add(6)
        with pytest.raises(QueueFullError, match="have 10 bytes; 10 are taken"):
            held.add(1)
        with pytest.raises(QueueFullError), room.holding(1):
            pass
        assert room.num_bytes == 10
    assert room.num_bytes == 0
    with room.holding():
        pass
    assert not room.by_key


def test_one_key_has_half_of_the_room() -> None:
    room = BodyRoom(10)

    def ask(name: str, num_bytes: int) -> None:
        set_caller(Caller(name))
        with room.holding(num_bytes):
            if name == "me":
                contextvars.copy_context().run(ask, "they", 5)
                room.check(0, "me")

    contextvars.copy_context().run(ask, "me", 5)
    with pytest.raises(KeyLimitError, match="5 are taken"):
        contextvars.copy_context().run(ask, "me", 6)
    assert not room.by_key and room.num_bytes == 0


def test_http_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room.BodyRoom.__init__, "__defaults__", (3000,))

    async def main() -> None:
        async with serving(make_core(delay=0.01)) as service:
            body = {"prompt": LONG_TEXT, "max_tokens": 100, "user": "x" * 1500}
            running = asyncio.create_task(service.post("/v1/completions", body))
            await until(lambda: service.num_steps > 0)
            refused = await service.client.post("/v1/completions", json=body)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert "bytes" in error_of(refused)["message"]
            await running
            await service.post("/v1/completions", body | {"max_tokens": 1})

    asyncio.run(main())


def test_grpc_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room.BodyRoom.__init__, "__defaults__", (1000,))

    async def main() -> None:
        async with serving_grpc(make_core(delay=0.01)) as service:
            stop = pb.StopOptions(max_new_tokens=100)
            request = pb.GenerateRequest(text="a" * 600, stop=stop)
            running = service.stub.Generate(request)
            await anext(aiter(running))
            code, details = await status_of(service.stub.Generate(request))
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "bytes" in details
            running.cancel()
            await until(service.is_idle)
            await anext(aiter(service.stub.Generate(request)))

    asyncio.run(main())
