"""`swiftjax demo`: the whole system in one command, as a user of the server would see it."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli.convert import convert_on_cpu
from swiftjax.cli.loading import progress
from swiftjax.cli.reporting import print_line
from swiftjax.errors import CheckpointError, DeadlineError, SwiftJaxError

if TYPE_CHECKING:
    from swiftjax.serving.client import Client

START_SECONDS = 300
STOP_SECONDS = 60
MAX_MODEL_LEN = 2048


def demo(
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="What to ask.")
    ] = "What is 2+2?",
    model: Annotated[str, typer.Option(help="The model to fetch.")] = "smollm2-135m",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
) -> None:
    """Fetch a small model, convert it, serve it, ask it something over gRPC, stop the server."""
    from swiftjax.serving.client import Client

    checkpoint = _prepare(model)
    with _running_server(checkpoint) as (server, target), Client(target) as client:
        _wait_until_serving(client, server)
        _ask(client, question, max_new_tokens)


def _prepare(model: str) -> Path:
    """Convert the model into the cache, unless an earlier run has left it there in good order."""
    from swiftjax.converters.demo_model import default_cache_dir, resolve_model

    # float32: exact on a CPU, which has no fast arithmetic in anything shorter.
    checkpoint = default_cache_dir() / f"{Path(model).name}-float32"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    try:
        _max_position(checkpoint)
    except CheckpointError:
        with progress(f"fetching {model}", quiet=False):
            source = resolve_model(model)
        # Whatever lies there is in our own cache and of no use.
        shutil.rmtree(checkpoint, ignore_errors=True)
        convert_on_cpu(source, checkpoint, dtype="float32", force=False, quiet=False)
    return checkpoint


def _max_position(checkpoint: Path) -> int:
    from swiftjax.converters.load import open_checkpoint

    return open_checkpoint(checkpoint, dtype=None).config.max_position


@contextmanager
def _running_server(checkpoint: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # Small enough to be warm within seconds, and no more of a GPU than it takes.
    options = {
        "--grpc-port": port,
        "--port": 0,
        "--max-num-seqs": 1,
        "--max-num-batched-tokens": 128,
        "--max-model-len": min(_max_position(checkpoint), MAX_MODEL_LEN),
        "--gpu-memory-utilization": 0.5,
    }
    command = [sys.executable, "-m", "swiftjax.cli", "serve", str(checkpoint)]
    server = subprocess.Popen(command + [str(part) for pair in options.items() for part in pair])
    try:
        yield server, f"127.0.0.1:{port}"
        if server.poll() is not None:
            raise SwiftJaxError(f"the server ended early with exit code {server.returncode}")
        server.terminate()
        if code := server.wait(STOP_SECONDS):
            raise SwiftJaxError(f"the server ended with exit code {code} instead of 0")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def _wait_until_serving(client: "Client", server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SwiftJaxError(f"the server ended with exit code {server.returncode}")
        try:
            return client.wait_until_serving(timeout=0.5)
        except DeadlineError:
            continue
    raise SwiftJaxError(f"the server was not SERVING after {START_SECONDS} s")


def _ask(client: "Client", question: str, max_new_tokens: int) -> None:
    from swiftjax.engine.request import GenerationConfig

    print_line(f"asking over gRPC: {question}")
    started = time.monotonic()
    arrivals: list[float] = []
    num_tokens = 0
    for delta in client.generate(
        messages=[{"role": "user", "content": question}],
        config=GenerationConfig(max_new_tokens=max_new_tokens),
        timeout=START_SECONDS,
    ):
        arrivals.append(time.monotonic() - started)
        num_tokens += len(delta.token_ids)
        if len(arrivals) == 1:
            num_first = num_tokens
        # The line ends with the answer, not with the call, which the server logs when it ends.
        print(delta.text, end="\n" if delta.finish_reason else "", flush=True)
    print(f"time to first token: {arrivals[0] * 1000:.0f} ms")
    if num_tokens > num_first:
        rate = (num_tokens - num_first) / (arrivals[-1] - arrivals[0])
        print(f"{num_tokens} tokens, {rate:.1f} tokens/s after the first")
