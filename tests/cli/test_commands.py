"""Every command on a tiny model: the happy path, interrupts, and failures at run time."""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftjax.cli.demo import _wait_until_serving
from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import SwiftJaxError
from swiftjax.serving.client import Client
from tests.cli.conftest import COMMAND, Cli, assert_one_clear_line


@pytest.fixture(scope="module")
def native(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as `swiftjax convert` writes it."""
    path = tmp_path_factory.mktemp("native") / "tiny"
    command = [*COMMAND, "convert", str(tiny), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == ""
    assert re.search(r"llama, 0\.\d million parameters in float32", result.stderr)
    return path


def test_convert_replaces_only_when_told_to(cli: Cli, tiny: Path, native: Path) -> None:
    refused = cli("convert", tiny, native)
    assert refused.returncode == 2
    assert_one_clear_line(refused, str(native), "--force")
    replaced = cli("convert", tiny, native, "--force", "--quiet", "--dtype", "float32")
    assert (replaced.returncode, replaced.stderr) == (0, "")


def last_line(path: Path) -> dict[str, Any]:
    """The last line of a trace."""
    return json.loads(path.read_text().splitlines()[-1])


def test_generate_from_arguments_stdin_and_token_ids(
    cli: Cli, tiny: Path, native: Path, tmp_path: Path
) -> None:
    options = ["--max-new-tokens", "5", "--ignore-eos", "--seed", "7", "--temperature", "1"]
    trace = ["--trace", tmp_path / "trace"]
    result = cli("generate", native, "ab", "cd", "--json", "--quiet", *options, *trace)
    assert (result.returncode, result.stderr) == (0, "")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first["num_prompt_tokens"] == second["num_prompt_tokens"] == 2
    assert len(first["token_ids"]) == len(first["logprobs"]) == 5
    assert first["finish_reason"] == "length"
    assert last_line(tmp_path / "trace").items() >= {"kind": "finish", "n": 1}.items()

    piped = cli("generate", tiny, *options, stdin="ab\n")
    assert piped.stdout == f"{first['text']}\n"
    assert "loading" in piped.stderr and "Traceback" not in piped.stderr
    # The tokenizer numbers the bytes in the order of their symbols: 64 is "a".
    by_id = cli("generate", native, "64, 65", "--token-ids", *options)
    assert by_id.stdout == piped.stdout


def test_endless_text(cli: Cli, tiny: Path) -> None:
    """More than max_position_embeddings."""
    options = ["--max-new-tokens", "300", "--ignore-eos", "--streaming-window", "40", "--json"]
    result = cli("generate", tiny, "ab", "--quiet", *options)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(json.loads(result.stdout)["token_ids"]) == 300


def test_ids_outside_the_vocabulary_are_2(cli: Cli, tiny: Path) -> None:
    result = cli("generate", tiny, "999999", "--token-ids")
    assert (result.returncode, result.stdout) == (2, "")
    assert_one_clear_line(result, "999999", "[0, 320)")


def test_interrupt_is_130(tiny: Path) -> None:
    command = [*COMMAND, "generate", str(tiny), "hi", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None and b"loading" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, stdout) == (130, b"")
    assert b"interrupted" in stderr and b"Traceback" not in stderr


def test_an_interrupt_in_a_collection_of_garbage_is_not_lost() -> None:
    code = """
import gc, time
import typer
from swiftjax.cli.reporting import ReportingGroup

def interrupted(phase, info):
    gc.callbacks.clear()
    raise KeyboardInterrupt

app = typer.Typer(cls=ReportingGroup)
app.callback()(lambda: None)

@app.command()
def wait():
    gc.callbacks.append(interrupted)
    gc.collect()
    time.sleep(30)

app()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "wait"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "swiftjax: interrupted\n")


def test_chat_over_a_pipe(cli: Cli, tiny: Path) -> None:
    lines = ["hi", "", "hi", "/reset", "hi", "x" * 300, "never"]
    result = cli("chat", tiny, "--max-new-tokens", "3", "--quiet", stdin="\n".join(lines))
    # The last is longer than the model; until then all went well.
    assert result.returncode == 2
    assert_one_clear_line(result, "max_model_len is 256")
    answers = result.stdout.removesuffix("\n").split("\n")
    assert len(answers) == 3
    assert answers[0] == answers[2]  # the third is the first once more, after /reset


MY_POLICY = f"{Path(__file__).resolve().parents[2]}/examples/my_policy.py:soonest_due"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_serve_answers_until_a_signal(tiny: Path, tmp_path: Path) -> None:
    port = free_port()
    small = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128"]
    small += ["--trace", str(tmp_path / "trace"), "--policy", MY_POLICY]
    process = subprocess.Popen(
        [*COMMAND, "serve", str(tiny), "--grpc-port", str(port), "--port", "0", *small]
    )
    try:
        with Client(f"127.0.0.1:{port}") as client:
            client.wait_until_serving(120.0)
            model = client.get_model()
            assert (model.name, model.family, model.max_model_len) == ("tiny", "llama", 128)
            config = GenerationConfig(max_new_tokens=4, ignore_eos=True)
            messages = [{"role": "user", "content": "hi"}]
            deltas = list(client.generate(messages=messages, config=config))
            assert deltas[-1].num_output_tokens == 4
            assert deltas[-1].num_prompt_tokens == len(client.tokenize(messages=messages))
        taken = subprocess.run(
            [*COMMAND, "serve", str(tiny), "--grpc-port", str(port), "--port", "0"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert taken.returncode == 1
        assert_one_clear_line(taken, f"cannot listen on 127.0.0.1:{port}")
        assert taken.stderr.count("\n") == 1
        process.terminate()
        assert process.wait(60) == 0
        ended = {"kind": "finish", "reason": "length", "output_len": 4}
        assert last_line(tmp_path / "trace").items() >= ended.items()
    finally:
        process.kill()
        process.wait()


def test_doctor(cli: Cli) -> None:
    result = cli("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == (1 if report["problems"] else 0)
    assert report["versions"]["jax"] and report["devices"]
    assert {"llama", "mistral", "qwen2", "qwen3"} <= set(report["families"])
    assert {"default", "linear", "dynamic", "llama3", "yarn"} == set(report["rope_kinds"])
    assert report["implementation"] in report["implementations"]
    text = cli("doctor").stdout
    assert report["versions"]["jax"] in text and report["implementation"] in text


def test_demo_with_a_tiny_model(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        result = cli("demo", "--model", tiny, "--max-new-tokens", "8")
        assert result.returncode == 0, result.stderr
        assert "time to first token: " in result.stdout
        # The cache is found to be broken next time, and is made anew.
        (tmp_path / "swiftjax" / "tiny-float32" / "manifest.json").write_text("{}")


def test_demo_fails_when_the_server_dies() -> None:
    dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    refused = pytest.raises(SwiftJaxError, match="exit code 3")
    with Client(f"127.0.0.1:{free_port()}") as client, refused:
        _wait_until_serving(client, dead)
