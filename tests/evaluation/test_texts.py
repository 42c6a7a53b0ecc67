"""Texts to measure with: what may be read, and how it is cut into pieces."""

from pathlib import Path

import numpy as np
import pytest

from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import InvalidRequestError
from swiftjax.evaluation.texts import cut_text, read_text
from tests.tiny_tokenizers import bos_processor, byte_level_files


def test_the_bundled_novel_is_whole_and_free() -> None:
    text = read_text(None)
    assert 400_000 < len(text.encode()) < 1_000_000
    assert text.startswith("Persuasion\n") and text.endswith("national importance.\n")
    folder = Path(__file__).parents[2] / "swiftjax" / "evaluation"
    assert "public domain" in (folder / "persuasion.LICENSE.txt").read_text()


def test_lines_of_json_are_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two", "source": "x"}\n')
    assert read_text(path) == "one\n\ntwo"


@pytest.mark.parametrize("line", ["{", '{"content": "one"}', '"one"', '{"text": 1}'])
def test_other_lines_are_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(InvalidRequestError, match="line 2"):
        read_text(path)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "x.txt", tmp_path / "missing.txt", tmp_path):
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            read_text(path)


def test_pieces_follow_each_other_without_a_gap() -> None:
    tokenizer = Tokenizer(byte_level_files())
    text = "abcdefghij" * 5
    pieces = cut_text(text, tokenizer, length=8, num_tokens=30)
    assert [len(piece) for piece in pieces] == [8, 8, 8]
    assert np.concatenate(pieces).tolist() == tokenizer.encode(text)[:24]
    with pytest.raises(InvalidRequestError, match="50 tokens, fewer than one piece of 51"):
        cut_text(text, tokenizer, length=51, num_tokens=1000)


def test_every_piece_begins_as_a_text_does() -> None:
    tokenizer = Tokenizer(byte_level_files(post_processor=bos_processor(eos=True)))
    pieces = cut_text("abcdefghij", tokenizer, length=4, num_tokens=100)
    whole = tokenizer.encode("abcdefghij")
    assert whole[0] == tokenizer.bos_token_id
    assert [piece[0] for piece in pieces] == [whole[0]] * 3
    assert np.concatenate([piece[1:] for piece in pieces]).tolist() == whole[1:10]
