"""Where API keys come from: options, a file and the environment. The only place that reads them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swiftjax.errors import InvalidRequestError

if TYPE_CHECKING:
    from swiftjax.serving.keys import KeyRing

ENVIRONMENT = "SWIFTJAX_API_KEYS"  # with commas between


def make_key_ring(values: Sequence[str], path: Path | None) -> "KeyRing":
    """Unite the keys of all sources; the file is read again whenever the ring is reloaded."""
    from swiftjax.serving.keys import KeyEntry, KeyRing, parse_keys

    fixed = [*values, *os.environ.get(ENVIRONMENT, "").split(",")]

    def load() -> list[KeyEntry]:
        entries = [KeyEntry(key) for value in fixed if (key := value.strip())]
        if path is None:
            return entries
        try:
            found = parse_keys(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"cannot read the API keys of {path}: {error}") from error
        if not found:
            raise InvalidRequestError(f"{path} has no API key: write one per line")
        return entries + found

    return KeyRing(load)
