"""The command line as a user runs it: its own process, its exit code, what it writes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_checkpoints import tiny_config, write_checkpoint

COMMAND = [sys.executable, "-m", "swiftjax.cli"]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in a Hugging Face directory; it knows no word but answers every prompt."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", tiny_config())


@pytest.fixture
def cli() -> Cli:
    """Run a command to its end."""

    def run(*args: object, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        command = [*COMMAND, *map(str, args)]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def assert_one_clear_line(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """The error is the last line of stderr, names what matters, and there is no traceback."""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("swiftjax: error: "), result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in last
