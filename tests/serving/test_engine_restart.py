"""A server whose engine is a process of its own: killed, started again, drained, never orphaned."""

import asyncio
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import NotReadyError
from swiftjax.serving import server
from swiftjax.serving.client import Client
from swiftjax.serving.listeners import Listen, Listeners
from swiftjax.serving.served import Served
from tests.serving.harness import PATIENCE
from tests.serving.harness import wait_until as until
from tests.serving.http.test_process import Server, running
from tests.stalls import tried_again_after_stalls

NUM_TOKENS = 50
ANSWER = "".join(chr(33 + i) for i in range(NUM_TOKENS))


def ask(client: Client, count: int = NUM_TOKENS) -> str:
    """A whole answer."""
    config = GenerationConfig(max_new_tokens=count)
    return "".join(delta.text for delta in client.generate(text=" ", config=config))


def engine_pids(server: Server) -> list[int]:
    """The engine processes that the server has started so far."""
    return [int(pid) for pid in re.findall(r"engine process (\d+)", "".join(server._errors))]


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only what is left until its parent looks."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@tried_again_after_stalls
def test_p5_a_killed_engine_is_unavailable_at_once_and_then_replaced() -> None:
    # The client asks three times, which takes it a third of a second.
    args = ("--apart", "--max-restarts", 1, "--load-seconds", 2)
    with running(*args) as server, Client(server.grpc) as client:
        until(lambda: engine_pids(server))
        with ThreadPoolExecutor(20) as pool, server.client() as web:
            answers = [pool.submit(ask, client, 4000) for _ in range(20)]
            ask(client, 5)  # by now all of them run
            os.kill(engine_pids(server)[0], signal.SIGKILL)
            killed = time.monotonic()
            for answer in answers:
                with pytest.raises(NotReadyError, match="SIGKILL"):
                    answer.result()
            assert time.monotonic() - killed < 1.0
            with pytest.raises(NotReadyError, match="started again"):
                ask(client)
            assert web.get("/ready").status_code == 503
            assert web.get("/health").status_code == 200
            client.wait_until_serving(PATIENCE)
            # The same ports, and the first engine left nothing.
            assert ask(client) == ANSWER
            assert web.post("/v1/completions", json={"prompt": " ", "max_tokens": 3}).json()
            samples = web.get("/metrics").text
            assert re.search(r"swiftjax_engine_restarts_total\{.*\} 1\.0", samples)
            assert is_gone(engine_pids(server)[0])
            # No third engine: whoever watches the server is to decide.
            os.kill(engine_pids(server)[1], signal.SIGKILL)
            assert server.process.wait(PATIENCE) == 1


def test_an_engine_that_breaks_is_replaced_too_and_its_trace_is_in_the_log() -> None:
    with running("--apart", "--die-after", 10, "--max-restarts", 1) as server:
        with Client(server.grpc) as client:
            for _ in range(2):
                client.wait_until_serving(PATIENCE)
                with pytest.raises(NotReadyError, match="RuntimeError"):
                    ask(client)
        assert server.process.wait(PATIENCE) == 1
        assert server.end().count("RuntimeError: broken on purpose\n") == 2


def test_p4_signal_to_all_processes_drains_an_engine_apart() -> None:
    # As a terminal and a service manager send it.
    with running("--apart", session=True) as server, Client(server.grpc) as client:
        with ThreadPoolExecutor(50) as pool:
            answers = [pool.submit(ask, client) for _ in range(50)]
            ask(client, 5)
            os.killpg(server.process.pid, signal.SIGTERM)
            assert [answer.result() for answer in answers] == [ANSWER] * 50
        assert server.process.wait(PATIENCE) == 0
        assert all(map(is_gone, engine_pids(server)))


@tried_again_after_stalls
def test_a_killed_server_leaves_no_engine_behind() -> None:
    with running("--apart") as server:
        until(lambda: engine_pids(server))
        server.process.kill()
        until(lambda: is_gone(engine_pids(server)[0]), 2.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@tried_again_after_stalls
def test_a_server_that_ends_while_its_engine_loads_leaves_none_behind(number: int) -> None:
    with running("--apart", "--load-seconds", 60, num_lines=0) as server:
        children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
        until(lambda: read(children))
        [pid] = map(int, read(children).split())
        time.sleep(0.3)  # somewhere between its start and its load
        server.process.send_signal(number)
        assert server.process.wait(2) != 0
        until(lambda: is_gone(pid), 2.0)


def read(path: str) -> str:
    """A file of /proc."""
    with open(path) as file:
        return file.read()


def test_a_process_that_the_system_refuses_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        listeners, tries = Listeners(Listen()), 0

        async def load() -> Served:
            nonlocal tries
            tries += 1
            raise BlockingIOError(11, "Resource temporarily unavailable")

        try:
            assert await server._start_again(load, server._Restarts(2), listeners) is None
        finally:
            await listeners.stop()
        assert tries == 2

    monkeypatch.setattr(server, "SECONDS_BETWEEN_TRIES", 0.0)
    asyncio.run(main())
