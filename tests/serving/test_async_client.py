"""The client for asyncio, what both clients try again, and `chat --server`."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import DeadlineError, InvalidRequestError, NotReadyError, UnauthenticatedError
from swiftjax.serving.async_client import AsyncClient
from swiftjax.serving.client import Client
from swiftjax.serving.keys import KeyEntry
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from tests.serving.harness import Service, until
from tests.serving.http.harness import KEY, HttpService, make_keys
from tests.serving.http.harness import run as run_with_keys
from tests.serving.http.test_process import running
from tests.serving.test_cancel import run

THREE = GenerationConfig(max_new_tokens=3)


def test_answers_ids_and_models() -> None:
    async def body(service: Service) -> None:
        async with AsyncClient(service.server.address) as client:
            assert await client.tokenize(text="ab") == [97, 98]
            assert await client.detokenize([97, 98]) == "ab"
            assert (await client.get_model()).name == "bytes"
            for prompt in ({"text": "a"}, {"token_ids": [97]}):
                deltas = [d async for d in client.generate(config=THREE, **prompt)]
                assert "".join(d.text for d in deltas) == "bcd"
                assert deltas[-1].finish_reason == "length"
            with pytest.raises(InvalidRequestError, match="exactly one"):
                await anext(client.generate())
            with pytest.raises(DeadlineError):
                async for _ in client.generate(text="a", timeout=0.05):
                    pass

    run(body, delay=0.005)


def test_closing_the_generator_cancels_the_call() -> None:
    async def body(service: Service) -> None:
        async with AsyncClient(service.server.address) as client:
            forever = GenerationConfig(max_new_tokens=4000, ignore_eos=True)
            answer = client.generate(text="a", config=forever)
            await anext(answer)
            await answer.aclose()
            await until(service.is_idle)

    run(body, delay=0.005)


def test_the_key_is_sent() -> None:
    async def body(service: HttpService) -> None:
        address = service.listeners.grpc.address
        async with AsyncClient(address, api_key=KEY) as client:
            assert (await client.get_model()).name == "bytes"
        async with AsyncClient(address) as client:
            with pytest.raises(UnauthenticatedError):
                await client.get_model()

    run_with_keys(body, keys=make_keys(KeyEntry(KEY)))


class Flaky(pb_grpc.GenerationServiceServicer):
    """Goes away some times, before or after its first message."""

    def __init__(self, num_failures: int, *, after_first: bool) -> None:
        self.num_calls = 0
        self._num_failures = num_failures
        self._after_first = after_first

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Fail, or answer with one message."""
        self.num_calls += 1
        fails = self.num_calls <= self._num_failures
        if self._after_first or not fails:
            yield pb.GenerateResponse(text="x", finish_reason=pb.FINISH_REASON_STOP)
        if fails:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


@asynccontextmanager
async def listening(service: Flaky) -> AsyncIterator[str]:
    """A server of it; its address."""
    server = grpc.aio.server()
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize(
    ("num_failures", "after_first", "num_calls"),
    [(0, False, 1), (2, False, 3), (3, False, 3), (1, True, 1)],
)
@pytest.mark.parametrize("blocking", [False, True])
def test_only_what_has_not_begun_is_tried_again(
    num_failures: int, after_first: bool, num_calls: int, blocking: bool
) -> None:
    async def main() -> None:
        service = Flaky(num_failures, after_first=after_first)

        def ask(address: str) -> list[str]:
            with Client(address) as client:
                return [delta.text for delta in client.generate(text="a")]

        async with listening(service) as address:
            try:
                if blocking:
                    texts = await asyncio.to_thread(ask, address)
                else:
                    async with AsyncClient(address) as client:
                        texts = [delta.text async for delta in client.generate(text="a")]
                assert texts == ["x"] and num_failures < 3
            except NotReadyError:
                assert num_failures == 3 or after_first
        assert service.num_calls == num_calls

    asyncio.run(main())


def test_chat_with_a_server() -> None:
    with running() as server:
        command = [sys.executable, "-m", "swiftjax.cli", "chat", "--server", server.grpc]
        done = subprocess.run(
            [*command, "--max-new-tokens", "3"],
            input="Hi\n/reset\nHi\n", capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert done.stdout == "<=>\n<=>\n"
        both = subprocess.run(
            [*command, "model"], capture_output=True, text=True, check=False, timeout=60
        )
        assert both.returncode == 2 and "one of MODEL and --server" in both.stderr


def test_long_requests_are_not_cut_by_retries() -> None:
    """What a retry may send again is kept only up to a limit; longer requests are sent once."""

    async def body(service: Service) -> None:
        async with AsyncClient(service.server.address) as client:
            assert len(await client.tokenize(text="a" * 2**20)) == 2**20

    run(body, delay=0.0)
