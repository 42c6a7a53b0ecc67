"""Help, usage errors and bad input: quick answers, exit code 2, one line that says what to do."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, assert_one_clear_line
from tests.tiny_checkpoints import tiny_config, write_checkpoint

COMMANDS = ("convert", "generate", "chat", "serve", "plan", "replay", "doctor", "demo")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_every_default(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.returncode == 0
    options = re.split(r"\n  (?=-)", result.stdout.partition("Options:")[2])[1:]
    assert options.pop().startswith("-h, --help")
    for option in options:
        assert "[default:" in " ".join(option.split()), option


def test_help_of_the_whole_names_every_command(cli: Cli) -> None:
    result = cli("--help")
    assert result.returncode == 0
    assert all(f"  {command}" in result.stdout for command in COMMANDS)
    assert cli("--version").stdout.startswith("swiftjax ")


def test_help_loads_neither_jax_nor_grpc() -> None:
    code = (
        "import sys\n"
        "from swiftjax.cli import app\n"
        f"for command in {COMMANDS!r}:\n"
        "    app([command, '--help'], standalone_mode=False)\n"
        "loaded = {'jax', 'grpc', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nothing"],
        ["generate"],
        ["convert", "only-one"],
        ["generate", "m", "p", "--max-new-tokens", "many"],
        ["convert", "a", "b", "--dtype", "int8"],
        ["serve", "m", "--grpc-port", "70000"],
        ["serve", "m", "--unknown"],
        ["serve", "m", "--policy", "lottery"],
        ["serve", "m", "--max-silent-seconds", "0.5"],
        ["replay", "--requests", "0"],
    ],
)
def test_bad_usage_is_2(cli: Cli, args: list[str]) -> None:
    result = cli(*args)
    assert result.returncode == 2
    assert "Usage: swiftjax" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "/no/such/model", "hi"], ["/no/such/model", "smollm2-135m"]),
        (["chat", "/no/such/model"], ["/no/such/model"]),
        (["serve", "/no/such/model", "--grpc-port", "0"], ["/no/such/model"]),
        (["convert", "/no/such/model", "/no/such/place"], ["/no/such/model"]),
        (["generate", "m", "hi", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "m", "hi", "--max-new-tokens", "0"], ["max_new_tokens", "0"]),
        (["generate", "m", "hi", "--stop", ""], ["stop strings", "non-empty"]),
        (["generate", "m", "1 two", "--token-ids"], ["1 two", "token ids"]),
        (["generate", "m", "hi", "--gpu-memory-utilization", "2"], ["gpu_memory_utilization"]),
        (["serve", "m", "--max-num-seqs", "0"], ["max_batch_size", "0"]),
        (["serve", "m", "--swap-space-gib", "-1"], ["swap_space_gib", "-1", "0 (no swap)"]),
        (["serve", "m", "--host", "0.0.0.0"], ["0.0.0.0", "--insecure"]),
        (["serve", "m", "--host", "::"], ["::", "--insecure"]),
        (["serve", "m", "--chat-template", "/no/such/file"], ["/no/such/file"]),
        (["replay"], ["--synthetic"]),
        (["replay", "/no/such/trace"], ["/no/such/trace"]),
        (["replay", "t", "--synthetic", "poisson:1"], ["either"]),
        (["replay", "--synthetic", "poisson:-1"], ["poisson:-1", "poisson:8"]),
        (["replay", "t", "--policy", "lottery"], ["lottery", "shortest-first", "file.py:function"]),
        (["replay", "t", "--policy", "/no/such.py:f"], ["/no/such.py"]),
        (["replay", "--synthetic", "poisson:1", "--cost-model", "h100"], ["h100", "llama3-8b"]),
        (["replay", "--synthetic", "poisson:1", "--cost-model", "recorded"], ["FILE"]),
    ],
)
def test_bad_input_is_2_and_named(cli: Cli, args: list[str], words: list[str]) -> None:
    result = cli(*args)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert_one_clear_line(result, *words)


def test_model_that_is_not_supported_is_named(cli: Cli, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", tiny_config())
    for keys, word in (
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
    ):
        (model / "config.json").write_text(json.dumps(tiny_config() | keys))
        result = cli("convert", model, tmp_path / "out")
        assert result.returncode == 2
        assert_one_clear_line(result, word)
        assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in cli("--debug", "generate", "/no/such/model", "hi").stderr
    monkeypatch.setenv("SWIFTJAX_DEBUG", "1")
    assert "Traceback" in cli("generate", "/no/such/model", "hi").stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["convert", "a", "--model_path", "b", "--output_path", "c"], "given twice: a and b"),
        (
            ["convert", "smollm2-135m", "c", "--quant_type", "bf16", "--dtype", "float32"],
            "--quant-type bf16 means --dtype bfloat16",
        ),
    ],
)
def test_convert_with_two_words_for_one_thing(cli: Cli, args: list[str], words: str) -> None:
    result = cli(*args)
    assert result.returncode == 2 and words in result.stderr
