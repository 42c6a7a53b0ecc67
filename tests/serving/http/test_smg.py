"""The SMG gateway, unmodified, before two of our servers: OpenAI's client in front, tokens behind.

The gateway lives in an environment of its own. One gateway and its servers serve all tests but the
one that kills a server.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import openai
import pytest

from tests.environments import programs_of
from tests.serving.http.test_process import Server, running

PACKAGE = "smg>=1.13,<2"
HI = [{"role": "user", "content": "Hi"}]
ROUTING_KEY = "X-SMG-Routing-Key"
NUM_IN_FLIGHT = 150
NUM_STREAMS = 12  # so many that each of two servers has some, whatever their ports are
START_SECONDS = 60

Two = tuple[list[Server], openai.OpenAI]


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def program() -> Path:
    """The gateway's executable."""
    return programs_of("smg", PACKAGE) / "smg"


@contextmanager
def gateway(program: Path, servers: list[Server]) -> Iterator[str]:
    """A gateway that knows the servers; its address."""
    port = free_port()
    command = [str(program), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "consistent_hashing"]
    command += ["--worker-urls", *(f"grpc://{server.grpc}" for server in servers)]
    environment = {"PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for_workers(address, len(servers))
        yield address
    finally:
        process.kill()
        process.wait()


def wait_for_workers(address: str, count: int) -> None:
    """Return when the gateway has found every server."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            workers = httpx2.get(f"{address}/workers", trust_env=False).json()["workers"]
            if sum(worker["is_healthy"] for worker in workers) == count:
                return
        except (httpx2.TransportError, ValueError, KeyError):
            pass
        time.sleep(0.2)
    raise AssertionError("the gateway did not find the servers")


@contextmanager
def two_behind(program: Path) -> Iterator[Two]:
    """Two servers behind a gateway, and OpenAI's client of that."""
    with running() as first, running() as second:
        servers = [first, second]
        with (
            gateway(program, servers) as address,
            openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
        ):
            yield servers, client


@pytest.fixture(scope="module")
def two(program: Path) -> Iterator[Two]:
    """For tests that leave the servers as they were."""
    with two_behind(program) as both:
        yield both


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait, but not for ever."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def num_running(server: Server) -> int:
    """Requests in the batch of a server."""
    return count_of(server, "swiftjax_num_requests_running")


def count_of(server: Server, name: str) -> int:
    """A metric of a server, over all its labels."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name)))


def test_gateway_chats_and_streams(two: Two) -> None:
    _, client = two
    answer = client.chat.completions.create(model="bytes", messages=HI, max_tokens=5)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "<=>?@"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.total_tokens == 13
    stream = client.chat.completions.create(
        model="bytes",
        messages=HI,  # type: ignore[arg-type]
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "<=>?@"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
    with pytest.raises(openai.APIStatusError):
        client.chat.completions.create(model="nope", messages=HI)  # type: ignore[arg-type]


def test_client_that_leaves_is_an_abort_in_the_engine(two: Two) -> None:
    servers, client = two
    for _ in range(5):
        stream = client.chat.completions.create(
            model="bytes",
            messages=HI,  # type: ignore[arg-type]
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _, chunk in zip(range(5), stream, strict=False):
            assert chunk.model == "bytes"
        assert sum(map(num_running, servers)) == 1
        stream.close()
        wait_for(lambda: not sum(map(num_running, servers)))


def test_one_session_stays_on_one_server(two: Two) -> None:
    servers, client = two
    used: set[tuple[int, ...]] = set()
    for session in range(40):
        if session >= 8 and len(used) == 2:
            break
        before = [count_of(server, "swiftjax_requests_total") for server in servers]
        for _ in range(4):
            client.chat.completions.create(
                model="bytes",
                messages=HI,  # type: ignore[arg-type]
                max_tokens=1,
                extra_headers={ROUTING_KEY: f"session-{session}"},
            )
        after = [count_of(server, "swiftjax_requests_total") for server in servers]
        served = tuple(b - a for a, b in zip(before, after, strict=True))
        assert sorted(served) == [0, 4]
        used.add(served)
    assert len(used) == 2  # both servers have sessions


def test_p6_no_answer_is_lost_when_one_of_two_servers_is_killed(program: Path) -> None:
    """Whole answers come from the other server; a stream that has begun ends with no reason."""
    with two_behind(program) as (servers, client), ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(end_of_stream, client, index) for index in range(NUM_STREAMS)]
        wait_for(lambda: min(map(num_running, servers)) >= 1)
        kill_while_asked(servers, client)
        ends = [stream.result() for stream in streams]
        assert {"length", None} == set(ends), ends


def end_of_stream(client: openai.OpenAI, session: int) -> str | None:
    """Why a streamed answer ended; None when it broke off."""
    reason = None
    with suppress(openai.APIError, httpx2.TransportError):
        for chunk in client.chat.completions.create(
            model="bytes",
            messages=HI,  # type: ignore[arg-type]
            max_tokens=190,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={ROUTING_KEY: f"session-{session}"},
        ):
            reason = chunk.choices[0].finish_reason or reason
    return reason


def kill_while_asked(servers: list[Server], client: openai.OpenAI) -> None:
    """Kill the first server while both are at work on whole answers."""

    def ask(index: int) -> str | None:
        answer = client.chat.completions.create(
            model="bytes",
            messages=HI,  # type: ignore[arg-type]
            max_tokens=30,
            extra_headers={ROUTING_KEY: f"session-{index}"},
        )
        return answer.choices[0].message.content

    with ThreadPoolExecutor(NUM_IN_FLIGHT) as pool:
        answers = [pool.submit(ask, index) for index in range(NUM_IN_FLIGHT)]
        wait_for(lambda: num_running(servers[0]) >= 10)
        servers[0].process.kill()
        expected = "".join(chr(60 + i) for i in range(30))
        assert [answer.result() for answer in answers] == [expected] * NUM_IN_FLIGHT
