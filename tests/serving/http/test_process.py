"""A server as a process, over HTTP: drains, signals, engine death, nothing secret in its logs."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import httpx2

from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import SwiftJaxError
from swiftjax.serving.client import Client
from tests.serving.harness import PATIENCE, wait_until
from tests.serving.http.harness import read_events
from tests.stalls import tried_again_after_stalls

COMMAND = [sys.executable, "-m", "tests.serving.fake_server", "0"]
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_TOKENS = 50
ANSWER = "".join(chr(33 + i) for i in range(NUM_TOKENS))
KEY, OTHER_KEY = "canary-key-4711", "another-canary-key"
CANARY = "canary-prompt-4711"


class Server:
    """A running process, its addresses, and all it wrote once it has ended."""

    def __init__(self, *args: object, num_lines: int = 2, session: bool = False) -> None:
        """Wait for that many lines; `session` makes it the head of a process group."""
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=session,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        # A full pipe would hold the server up.
        self._errors: list[str] = []
        self._rest: list[str] = []
        self._readers = [self._start_reading(self.process.stderr, self._errors)]
        self.lines = [self.process.stdout.readline() for _ in range(num_lines)]
        self._readers.append(self._start_reading(self.process.stdout, self._rest))
        if not all(line.startswith("serving bytes on ") for line in self.lines):
            raise AssertionError(self.end())
        self.grpc, self.http = [line.split()[3] for line in self.lines] or ("", "")

    def _start_reading(self, pipe: IO[str], lines: list[str]) -> threading.Thread:
        def read() -> None:
            with pipe:
                lines.extend(pipe)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def client(self, key: str = "") -> httpx2.Client:
        """A client that sends this key."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx2.Client(base_url=self.http, headers=headers, timeout=30, trust_env=False)

    def end(self) -> str:
        """Everything that was written, once all processes that could write have ended."""
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(PATIENCE)
            assert not reader.is_alive(), "a process that it started is still there"
        return "".join((*self.lines, *self._rest, *self._errors))


@contextmanager
def running(*args: object, num_lines: int = 2, session: bool = False) -> Iterator[Server]:
    """A server that is killed in the end."""
    server = Server(*args, num_lines=num_lines, session=session)
    try:
        yield server
    finally:
        server.end()


def test_p4_signal_drains_answers_of_both_kinds() -> None:
    request = {"prompt": " ", "max_tokens": NUM_TOKENS}
    with running() as server, server.client() as client, ThreadPoolExecutor(50) as pool:

        def ask(stream: bool) -> str:
            response = client.post(COMPLETE, json=request | {"stream": stream})
            assert response.status_code == 200
            chunks = read_events(response.text) if stream else [response.json()]
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        answers = [pool.submit(ask, i % 2 == 0) for i in range(50)]
        held = {"prompt": " ", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETE, json=held) as response:
            next(response.iter_lines())
            wait_until(lambda: sum(a.done() for a in answers) + num_running(client) == 51)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/ready").status_code == 503)
            refused = client.post(COMPLETE, json=request)
            assert refused.status_code == 503 and "shutting down" in refused.text
            assert client.get("/health").status_code == 200
        assert [answer.result() for answer in answers] == [ANSWER] * 50
        assert server.process.wait(PATIENCE) == 0


def num_running(client: httpx2.Client) -> int:
    """Requests in the batch of the client's server."""
    found = re.search(r"^swiftjax_num_requests_running\S* (\d+)", client.get("/metrics").text, re.M)
    assert found is not None
    return int(found[1])


@tried_again_after_stalls
def test_p5_engine_that_dies_is_503_and_ends_the_process() -> None:
    with running("--die-after", 10) as server, server.client() as client:
        started = time.monotonic()
        response = client.post(COMPLETE, json={"prompt": "a", "max_tokens": 100})
        assert response.status_code == 503 and time.monotonic() - started < 2
        assert "broken on purpose" not in response.text
        assert server.process.wait(PATIENCE) == 1


def test_p10_keys_are_read_again_on_sighup(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    with running("--keys", path) as server, server.client(OTHER_KEY) as client:
        assert client.get("/version").status_code == 401
        path.write_text(OTHER_KEY)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: client.get("/version").status_code == 200)
        path.write_text("broken line of keys")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "what there is of API keys stays" in "".join(server._errors))
        assert client.get("/version").status_code == 200


def test_p11_neither_keys_nor_prompts_are_written_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n{OTHER_KEY} admin\n")
    turn = {"role": "user", "content": CANARY}
    bodies: list[object] = [
        {"messages": [turn], "max_tokens": 3},
        {"messages": [turn], "max_tokens": 3, "stream": True, "logprobs": True},
        {"messages": [turn | {"role": "x" * 65}]},
        {"messages": [turn | {"content": CANARY + "\x00"}]},
        {"messages": [turn], "n": 99},
        {"messages": [turn], "user": CANARY, "session_id": CANARY, "max_tokens": 1},
        {"messages": [turn | {"content": CANARY * 100_000}]},
    ]
    with running("--keys", path) as server, server.client(KEY) as client:
        answers = [client.post(CHAT, json=body).text for body in bodies[2:]]
        for body in bodies[:2]:
            assert client.post(CHAT, json=body).status_code == 200
        for prompt in (CANARY, [CANARY], [CANARY, 5]):
            client.post(COMPLETE, json={"prompt": prompt, "max_tokens": 3, "echo": True})
        for body in (f'{{"messages": "{CANARY}"}}', f'{{"prompt": "{CANARY}', CANARY):
            headers = {"content-type": "application/json"}
            answers.append(client.post(CHAT, content=body, headers=headers).text)
        client.post("/tokenize", json={"prompt": CANARY})
        for key in (f"{KEY}x", CANARY, OTHER_KEY):
            answers.append(client.get("/version", headers={"authorization": f"Bearer {key}"}).text)
        client.get(f"/version?key={KEY}&prompt={CANARY}")
        with Client(server.grpc, api_key=OTHER_KEY) as ours, suppress(SwiftJaxError):
            list(ours.generate(text=CANARY, config=GenerationConfig(max_new_tokens=3)))
            ours.tokenize(text=CANARY + "\x00")
        answers.append(client.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        written = server.end()
        for text in (written, *answers):
            assert KEY not in text and OTHER_KEY not in text and CANARY not in text
        # The log has a line of JSON for each call, with its id and how it ended.
        lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
        calls = [line for line in lines if "request_id" in line]
        assert {"http", "grpc"} == {line["protocol"] for line in calls}
        assert {"200", "400", "401", "OK"} <= {line["status"] for line in calls}
        assert all(line["seconds"] >= 0 and line["call"] for line in calls)
