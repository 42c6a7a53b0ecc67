"""The text to measure or calibrate with: the bundled novel, a text file, or the texts of a JSONL.

Gives pieces of token ids of one length. The tokenizer is handed in; no model is known here.
"""

import json
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import InvalidRequestError

BUNDLED = Path(__file__).with_name("persuasion.txt")
MAX_BYTES = 64 * 2**20


def read_text(path: Path | None) -> str:
    """Read a text file, or the fields `text` of a .jsonl file as paragraphs; None: the novel.

    Raises InvalidRequestError for what cannot be read or is no such file.
    """
    if path is None:
        path = BUNDLED
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise InvalidRequestError(f"{path} has {size} bytes; at most {MAX_BYTES} are read")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the text {path} cannot be read: {error}") from error
    return _join_lines(path, text) if path.suffix == ".jsonl" else text


def _join_lines(path: Path, text: str) -> str:
    texts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InvalidRequestError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise InvalidRequestError(
                f'{path}, line {number} is {line:.80}; every line must be like {{"text": "..."}}'
            )
        texts.append(entry["text"])
    return "\n\n".join(texts)


def cut_text(
    text: str, tokenizer: Tokenizer, *, length: int, num_tokens: int
) -> list[Int32[np.ndarray, " length"]]:
    """The first `num_tokens` tokens of a text in pieces of `length`, what is left over dropped.

    Every piece starts as a text does: with the token that the tokenizer puts in front, if any.
    Raises InvalidRequestError for a text that is shorter than one piece.
    """
    first = tokenizer.encode("")
    whole = tokenizer.encode(text)
    # Only what stands in front of a text stands in front of the empty one, save end markers.
    start = first[:1] if first and whole[:1] == first[:1] else []
    ids, step = whole[len(start) :], length - len(start)
    count = min(len(ids), num_tokens) // step
    if not count:
        raise InvalidRequestError(
            f"the text has {min(len(ids), num_tokens)} tokens, fewer than one piece of {length}: "
            "give a longer text or choose shorter pieces"
        )
    pieces = np.asarray(ids[: count * step], np.int32).reshape(count, step)
    return [np.concatenate([np.asarray(start, np.int32), piece]) for piece in pieces]
