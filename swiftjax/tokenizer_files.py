"""The text side of a checkpoint as plain values: tokenizer.json, tokenizer_config.json, template.

Knows the file names of a Hugging Face directory (a native checkpoint keeps the same three) and
nothing about tokenising. `converters` makes these values; `engine.tokenizer` turns them into text.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftjax.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE)
_OLD_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tokenizer.tiktoken")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """What a tokenizer is made of. `config` never holds the chat template."""

    tokenizer_json: str
    config: dict[str, Any]
    chat_template: str | None = None

    def special_token(self, name: str) -> str | None:
        """Text of a special token such as `bos_token`; None when the checkpoint has none."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{CONFIG_FILE}: {name} must be text, not {value!r:.80}")
        return value


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read the tokenizer of a Hugging Face or native checkpoint directory.

    Raises CheckpointError when tokenizer.json is absent or a file cannot be read.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(_missing(directory))
    tokenizer_json = _read_text(path)
    _parse_object(tokenizer_json, path)
    config = _read_object(directory / CONFIG_FILE)
    for name, token in _read_object(directory / SPECIAL_TOKENS_FILE).items():
        config.setdefault(name, token)
    inline = config.pop("chat_template", None)
    template_path = directory / TEMPLATE_FILE
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        config=config,
        chat_template=(
            _read_text(template_path) if template_path.is_file() else _default_template(inline)
        ),
    )


def write_tokenizer_files(files: TokenizerFiles, directory: Path) -> None:
    """Write the files so that `read_tokenizer_files` gives an equal value back."""
    config = json.dumps(files.config, indent=2, sort_keys=True, ensure_ascii=True)
    (directory / TOKENIZER_FILE).write_bytes(files.tokenizer_json.encode())
    (directory / CONFIG_FILE).write_bytes(config.encode() + b"\n")
    if files.chat_template is not None:
        (directory / TEMPLATE_FILE).write_bytes(files.chat_template.encode())


def _missing(directory: Path) -> str:
    found = [name for name in _OLD_FILES if (directory / name).is_file()]
    if not found:
        return f"{directory} has no {TOKENIZER_FILE}: copy it there from the original model"
    return (
        f"{directory} has {' and '.join(found)} but no {TOKENIZER_FILE}, the only tokenizer format "
        "that is read. Make it once with transformers: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )


def _read_text(path: Path) -> str:
    # Bytes, not text mode: that would turn \r\n in a template into \n.
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _parse_object(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _read_object(path: Path) -> dict[str, Any]:
    value = _parse_object(_read_text(path), path) if path.is_file() else {}
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path} has text with a lone surrogate: {error}") from error
    return value


def _default_template(value: object) -> str | None:
    """The template itself, or the one named "default" in a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        named = {}
    template = named.get("default")
    if not isinstance(template, str):
        raise CheckpointError(
            f"{CONFIG_FILE}: chat_template must be text or a list of named templates with one "
            f"called 'default', not {value!r:.120}"
        )
    return template
