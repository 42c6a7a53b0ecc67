"""Typed reading of GGUF metadata: every error names the key. Used by the GGUF readers."""

from typing import TypeVar

import gguf

from swiftjax.errors import CheckpointError

_T = TypeVar("_T")


class GgufMetadata:
    """The metadata keys of an open file under one prefix."""

    def __init__(self, reader: gguf.GGUFReader, prefix: str) -> None:
        self._fields = reader.fields
        self._prefix = prefix

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """Value of a key, None when absent. Raises CheckpointError for another type."""
        field = self._fields.get(self._prefix + key)
        if field is None:
            return None
        try:
            value = field.contents()
        except (ValueError, IndexError, TypeError) as error:  # UnicodeDecodeError is a ValueError
            raise CheckpointError(f"GGUF: cannot read {self._prefix}{key}: {error}") from error
        if not isinstance(value, kind):
            raise CheckpointError(
                f"GGUF: {self._prefix}{key} must be {kind.__name__}, not {type(value).__name__}"
            )
        return value

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
