"""A server as a process: signals, drains, exit codes, and what its clients see meanwhile."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import DeadlineError, NotReadyError
from swiftjax.serving.client import Client
from swiftjax.serving.messages import Delta
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from tests.serving.harness import PATIENCE, wait_until
from tests.stalls import tried_again_after_stalls

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
        process.communicate(timeout=PATIENCE)


def ask(client: Client, count: int = NUM_TOKENS) -> str:
    """A whole answer."""
    config = GenerationConfig(max_new_tokens=count)
    return "".join(delta.text for delta in client.generate(text=" ", config=config))


@contextmanager
def held(client: Client) -> Iterator[Iterator[Delta]]:
    """A long answer, for which a drain waits as long as it takes to look at it."""
    config = GenerationConfig(max_new_tokens=4000, ignore_eos=True)
    deltas = client.generate(text="a", config=config)
    next(deltas)
    try:
        yield deltas
    finally:
        deltas.close()  # type: ignore[attr-defined]


def num_running(address: str) -> int:
    """Requests in the batch of a server."""
    with grpc.insecure_channel(address) as channel:
        return pb_grpc.AdminServiceStub(channel).GetLoad(pb.GetLoadRequest()).num_running


def is_refused(client: Client) -> bool:
    """Whether new calls are, because of a drain."""
    try:
        client.get_model()
    except NotReadyError as error:
        assert "shutting down" in str(error)
        return True
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_drains_what_runs_and_refuses_what_comes(number: signal.Signals, code: int) -> None:
    with running() as (process, address), Client(address) as client:
        with ThreadPoolExecutor(50) as pool:
            answers = [pool.submit(ask, client) for _ in range(50)]
            with held(client):
                wait_until(lambda: sum(a.done() for a in answers) + num_running(address) == 51)
                process.send_signal(number)
                wait_until(lambda: is_refused(client))
            assert [answer.result() for answer in answers] == [ANSWER] * 50
        assert process.wait(PATIENCE) == code


def test_p4_second_signal_ends_at_once() -> None:
    with running() as (process, address), Client(address) as client, held(client) as stream:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_refused(client))
        process.send_signal(signal.SIGTERM)
        # The answer that it drained for would take 80 s.
        assert process.wait(20) == 128 + signal.SIGTERM
        with pytest.raises(NotReadyError):
            list(stream)


def test_engine_that_dies_ends_the_process_with_1() -> None:
    with running("--die-after", "10") as (process, address), Client(address) as client:
        with pytest.raises(NotReadyError, match="RuntimeError"):
            ask(client)
        assert process.wait(PATIENCE) == 1
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
        client.wait_until_serving(PATIENCE)
        process.kill()
        process.wait()
        gives_up_in_time(client)


@tried_again_after_stalls
def gives_up_in_time(client: Client) -> None:
    """A client whose server is gone."""
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"not SERVING after 0\.3 s"):
        client.wait_until_serving(0.3)
    assert time.monotonic() - started < 2
