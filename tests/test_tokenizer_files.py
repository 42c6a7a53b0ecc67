"""Reading and writing the tokenizer files of a checkpoint directory."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftjax.errors import CheckpointError
from swiftjax.tokenizer_files import TokenizerFiles, read_tokenizer_files, write_tokenizer_files


def _write(directory: Path, **files: Any) -> None:
    names = {"tokenizer": "tokenizer.json", "config": "tokenizer_config.json"}
    for name, value in files.items():
        (directory / names[name]).write_text(json.dumps(value), encoding="utf-8")


def test_config_and_template_are_optional(tmp_path: Path) -> None:
    _write(tmp_path, tokenizer={"model": {}})
    files = read_tokenizer_files(tmp_path)
    assert files == TokenizerFiles(tokenizer_json='{"model": {}}', config={}, chat_template=None)


@pytest.mark.parametrize(
    "template",
    ["hello", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "hello"}]],
    ids=["text", "named"],
)
def test_template_forms(tmp_path: Path, template: object) -> None:
    _write(tmp_path, tokenizer={}, config={"chat_template": template, "add_bos_token": True})
    files = read_tokenizer_files(tmp_path)
    assert files.chat_template == "hello"
    assert files.config == {"add_bos_token": True}


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    _write(tmp_path, tokenizer={}, config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_bytes(b"new\r\n")
    assert read_tokenizer_files(tmp_path).chat_template == "new\r\n"


def test_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    _write(tmp_path, tokenizer={}, config={"bos_token": {"content": "<s>", "lstrip": False}})
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "no", "eos_token": "</s>"}')
    files = read_tokenizer_files(tmp_path)
    assert files.special_token("bos_token") == "<s>"
    assert files.special_token("eos_token") == "</s>"
    assert files.special_token("pad_token") is None


def test_written_files_read_back_equal(tmp_path: Path) -> None:
    files = TokenizerFiles(
        tokenizer_json='{"a": "é\\ud83d\\ude00"}',
        config={"bos_token": "<s>", "n": [1, None]},
        chat_template="{{ 'ü' }}\r\n",
    )
    write_tokenizer_files(files, tmp_path)
    assert read_tokenizer_files(tmp_path) == files


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.model": b"x"}, "tokenizer.model but no tokenizer.json.*save_pretrained"),
        ({"tokenizer.json": b"{"}, "not valid JSON"),
        ({"tokenizer.json": b"[" * 200_000}, "not valid JSON"),
        ({"tokenizer.json": b"[]"}, "must hold a JSON object"),
        ({"tokenizer.json": b"\xff"}, "cannot read"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"3"}, "must hold a JSON object"),
        (
            {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"bos_token": "\\ud800"}'},
            "lone surrogate",
        ),
        (
            {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"chat_template": [{"a": 1}]}'},
            "called 'default'",
        ),
    ],
    ids=[
        "none",
        "sentencepiece",
        "cut",
        "deep",
        "list",
        "bytes",
        "config",
        "surrogate",
        "template",
    ],
)
def test_broken_directories_are_refused(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer_files(tmp_path)


def test_special_token_of_a_wrong_type() -> None:
    files = TokenizerFiles(tokenizer_json="{}", config={"bos_token": 3})
    with pytest.raises(CheckpointError, match="bos_token must be text, not 3"):
        files.special_token("bos_token")
