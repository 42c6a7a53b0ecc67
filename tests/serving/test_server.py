"""A server as a process: signals, drains, exit codes, and what its clients see meanwhile."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import DeadlineError, NotReadyError
from swiftjax.serving.client import Client

COMMAND = [sys.executable, "-m", "tests.serving.fake_server"]
NUM_TOKENS = 50
ANSWER = "".join(chr(33 + i) for i in range(NUM_TOKENS))


@contextmanager
def running(*args: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server on a free port and its address."""
    process = subprocess.Popen(
        [*COMMAND, "0", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving bytes on "), line
        yield process, line.split()[3]
    finally:
        process.kill()
        process.communicate()


def ask(client: Client, count: int = NUM_TOKENS) -> str:
    """A whole answer."""
    config = GenerationConfig(max_new_tokens=count)
    return "".join(delta.text for delta in client.generate(text=" ", config=config))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_drains_what_runs_and_refuses_what_comes(number: signal.Signals, code: int) -> None:
    with running() as (process, address), Client(address) as client:
        with ThreadPoolExecutor(50) as pool:
            answers = [pool.submit(ask, client) for _ in range(50)]
            ask(client, 5)  # by now all of the 50 run as well
            process.send_signal(number)
            time.sleep(0.1)
            with pytest.raises(NotReadyError, match="shutting down"):
                ask(client)
            assert [answer.result() for answer in answers] == [ANSWER] * 50
        assert process.wait(10) == code


def test_p4_second_signal_ends_at_once() -> None:
    with running() as (process, address), Client(address) as client:
        stream = client.generate(text="a", config=GenerationConfig(max_new_tokens=4000))
        next(stream)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(2) == 128 + signal.SIGTERM
        with pytest.raises(NotReadyError):
            list(stream)


def test_engine_that_dies_ends_the_process_with_1() -> None:
    with running("--die-after", "10") as (process, address), Client(address) as client:
        with pytest.raises(NotReadyError, match="RuntimeError"):
            ask(client)
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert "broken on purpose" in process.stderr.read()


def test_taken_port_ends_with_an_error_that_names_it() -> None:
    with running() as (_, address):
        port = address.rpartition(":")[2]
        second = subprocess.run([*COMMAND, port], capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in second.stderr


def test_client_waits_until_serving() -> None:
    with running() as (process, address), Client(address) as client:
        client.wait_until_serving(5.0)
        process.kill()
        process.wait()
        started = time.monotonic()
        with pytest.raises(DeadlineError, match=r"not SERVING after 0\.3 s"):
            client.wait_until_serving(0.3)
        assert time.monotonic() - started < 2
