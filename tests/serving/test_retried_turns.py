"""Turns whose answers are lost on the way: tried again by the clients, taken once by the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import RepeatedTurnError
from swiftjax.serving.async_client import AsyncClient
from swiftjax.serving.client import Client
from tests.serving.harness import Service, until
from tests.serving.test_cancel import run

FIVE = GenerationConfig(max_new_tokens=5)


class CuttingProxy:
    """Passes bytes both ways; when told, it cuts every connection that is open."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.num_connections = 0
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Have a port."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            self.cut()
            server.close()

    def cut(self) -> None:
        """As a balancer does that is restarted."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers = []

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        there, back = await asyncio.open_connection(*self._target.split(":"))
        self._writers += [writer, back]
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()


async def ask(address: str, session: str) -> None:
    """One turn of the client for asyncio."""
    async with AsyncClient(address) as client:
        async for _ in client.generate(session=session, text="a" * 900, config=FIVE):
            pass


def ask_blocking(address: str, session: str) -> None:
    """One turn of the other one."""
    with Client(address) as client:
        list(client.generate(session=session, text="a" * 900, config=FIVE))


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "blocking"])
def test_a_turn_whose_answer_was_lost_is_not_added_twice(is_async: bool) -> None:
    async def body(service: Service) -> None:
        proxy = CuttingProxy(service.server.address)
        async with proxy.listening():
            session = service.engine.sessions.open()
            if is_async:
                turn = asyncio.create_task(ask(proxy.address, session.session_id))
            else:
                call = asyncio.to_thread(ask_blocking, proxy.address, session.session_id)
                turn = asyncio.create_task(call)
            # In the middle of a prompt of four steps.
            await until(lambda: service.num_steps > 0)
            proxy.cut()
            with pytest.raises(RepeatedTurnError, match="under way or in the session's text"):
                await turn
            assert proxy.num_connections > 1  # it was tried again
            await until(lambda: not session.is_in_use)
            assert 900 <= len(session) < 905
            session.close()
        await until(service.is_idle)

    run(body, delay=0.1)
