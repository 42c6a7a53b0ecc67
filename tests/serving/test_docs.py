"""Every command of docs/serving.md, run in its order: shells, servers, Python.

Ports are replaced by free ones, and the model by the fake engine. A block whose lines start servers
keeps them until another wants their port.
"""

import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.environments import ROOT, programs_of
from tests.serving.harness import PATIENCE
from tests.serving.http.test_smg import PACKAGE, free_port

PAGE = ROOT / "docs" / "serving.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
SERVERS = ("swiftjax serve ", "smg launch ")
DEFAULTS = "--port 8000 --grpc-port 50051"
PORTS = re.compile(r"\b(8000|8001|8002|50051|50052|30000)\b")


class Server:
    """A process that listens, on ports as the page writes them, and what it says."""

    def __init__(self, command: list[str], ports: set[str], **settings: Any) -> None:
        self.ports = ports
        self.lines: list[str] = []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(command, text=True, **pipes, **settings)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            self.lines.extend(output)

    def wait_for(self, text: str) -> None:
        """Return when it has said this."""
        deadline = time.monotonic() + PATIENCE
        while not any(text in line for line in self.lines):
            alive = self._process.poll() is None and time.monotonic() < deadline
            assert alive, "".join(self.lines)
            time.sleep(0.02)

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(10)


class Terminal:
    """Runs blocks in one folder, with our command and the gateway on the path."""

    def __init__(self, folder: Path) -> None:
        self._ports: dict[str, str] = {}
        self._servers: list[Server] = []
        programs = folder / "bin"
        programs.mkdir()
        command = programs / "swiftjax"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.serving.fake_command "$@"\n')
        command.chmod(0o755)
        path = (str(programs), str(programs_of("smg", PACKAGE)), os.environ["PATH"])
        kept = {"HOME": str(folder), "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
        environment = kept | {"PATH": ":".join(path), "NO_PROXY": "127.0.0.1,localhost"}
        self._settings = {"cwd": folder, "env": environment}

    def run(self, language: str, text: str) -> None:
        """Run one block to its end, or start its servers."""
        if text.startswith(SERVERS) and "--help" not in text:
            for line in text.replace("\\\n", " ").splitlines():
                self._start(line)
            return
        start = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*start, self._place(text)], timeout=300, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **self._settings,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}"

    def close(self) -> None:
        """End every server."""
        for server in self._servers:
            server.stop()

    def _place(self, text: str) -> str:
        """Put free ports in the place of those that are written down."""
        return PORTS.sub(lambda found: self._ports.setdefault(found[0], str(free_port())), text)

    def _start(self, line: str) -> None:
        is_ours = line.startswith(SERVERS[0])
        if is_ours and "--port" not in line:
            line = f"{line} {DEFAULTS}"
        if not is_ours:
            line = f"{line} --prometheus-port {free_port()}"
        ports = set(re.findall(r"port (\d+)", line))
        for server in [server for server in self._servers if server.ports & ports]:
            self._servers.remove(server)
            server.stop()
        server = Server(shlex.split(self._place(line)), ports, **self._settings)
        self._servers.append(server)
        if is_ours:
            server.wait_for("(OpenAI HTTP)")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """One that ends its servers."""
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def test_every_command_of_the_page_works(terminal: Terminal) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) > 15 and {language for language, _ in blocks} == {"sh", "python"}
    for language, text in blocks:
        terminal.run(language, text)


def test_the_page_goes_in_the_order_of_an_operators_day() -> None:
    parts = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert parts == ["Run it", "Secure it", "Watch it", "Call it"]
