"""Typed reading of GGUF metadata: every error names the key. Used by the GGUF readers."""

from collections.abc import Mapping
from typing import Any, TypeVar

from swiftjax.errors import CheckpointError

_T = TypeVar("_T")


class GgufMetadata:
    """The metadata keys of a file (`gguf_header.read_header`) under one prefix."""

    def __init__(self, values: Mapping[str, Any], prefix: str) -> None:
        self._values = values
        self._prefix = prefix

    def name(self, key: str) -> str:
        """The whole name of a key, for messages."""
        return self._prefix + key

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """Value of a key, None when absent. Raises CheckpointError for another type."""
        value = self._values.get(self._prefix + key)
        if value is None:
            return None
        if not isinstance(value, kind):
            raise CheckpointError(
                f"GGUF: {self._prefix}{key} must be {kind.__name__}, not {type(value).__name__}"
            )
        return value

    def number(self, key: str) -> float | None:
        """Value of a key that some files store as an integer, None when absent."""
        value = self.get(key, object)
        return float(value) if isinstance(value, int) else self.get(key, float)

    def need(self, key: str, kind: type[_T]) -> _T:
        """Value of a key. Raises CheckpointError when it is absent."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"GGUF: {self._prefix}{key} is missing")
        return value

    def list_of(self, key: str, kind: type[_T], length: int | None = None) -> list[_T]:
        """A list of one type, and of one length where that is given."""
        values = self.need(key, list)
        if wrong := [value for value in values if not isinstance(value, kind)]:
            raise CheckpointError(f"GGUF: {self._prefix}{key} holds {wrong[0]!r:.80}")
        if length is not None and len(values) != length:
            raise CheckpointError(
                f"GGUF: {self._prefix}{key} has {len(values)} entries for {length} tokens"
            )
        return values
