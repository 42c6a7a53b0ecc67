"""What every token writes: bytes, read from the decoder block of tokenizer.json.

Tokens are bytes, not text: byte-level BPE and SentencePiece's byte fallback both cut characters
apart. Once the bytes of a token are known, decoding is joining, whole or piece by piece. Used by
`tokenizer.Tokenizer`; knows neither special tokens nor streams.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from swiftjax.errors import UnsupportedError


class TokenDecoder(NamedTuple):
    """How token texts become bytes, and how many leading spaces a whole text then loses."""

    to_bytes: Callable[[str], bytes]
    leading_spaces: int


def read_decoder(spec: Mapping[str, Any] | None) -> TokenDecoder:
    """Read the `decoder` block of tokenizer.json.

    Raises UnsupportedError, naming the block, for anything but ByteLevel and the SentencePiece
    chain Replace, ByteFallback, Fuse, Strip (each optional, in this order).
    """
    steps = spec.get("decoders", []) if spec and spec.get("type") == "Sequence" else [spec or {}]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenDecoder(_byte_level_bytes, 0)
    known = ["Replace", "ByteFallback", "Fuse", "Strip"]
    places = [known.index(kind) if kind in known else -1 for kind in kinds]
    if places and min(places) >= 0 and places == sorted(set(places)) and "Fuse" in kinds:
        return _sentencepiece({str(step["type"]): step for step in steps}, spec)
    raise _unsupported(spec)


def _sentencepiece(
    steps: Mapping[str, Mapping[str, Any]], spec: Mapping[str, Any] | None
) -> TokenDecoder:
    replace = steps.get("Replace", {"pattern": {"String": "\u2581"}, "content": "\u2581"})
    mark, content = replace.get("pattern", {}).get("String"), replace.get("content")
    strip = steps.get("Strip", {"content": " ", "start": 0, "stop": 0})
    if not mark or not isinstance(content, str) or strip["content"] != " " or strip["stop"]:
        raise _unsupported(spec)
    has_bytes = "ByteFallback" in steps

    def to_bytes(piece: str) -> bytes:
        byte = _fallback_byte(piece) if has_bytes else None
        return piece.replace(mark, content).encode() if byte is None else byte

    return TokenDecoder(to_bytes, int(strip["start"]))


def _unsupported(spec: Mapping[str, Any] | None) -> UnsupportedError:
    return UnsupportedError(
        f"tokenizer.json: decoder {spec!r:.300} is not supported; known are ByteLevel and "
        "the SentencePiece chain Replace, ByteFallback, Fuse, Strip(' ')"
    )


def _fallback_byte(piece: str) -> bytes | None:
    """The byte that a piece such as `<0x0A>` stands for."""
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return bytes([int(piece[3:5], 16)])
    except ValueError:
        return None


def byte_level_alphabet() -> Sequence[str]:
    """The 256 characters by which byte-level BPE writes bytes 0..255 (GPT-2's scheme).

    Printable Latin-1 characters stand for themselves; the rest take code points from 256 upwards.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(byte_level_alphabet())}


def _byte_level_bytes(piece: str) -> bytes:
    # A token with any character outside the alphabet (an added token) is plain text.
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()
