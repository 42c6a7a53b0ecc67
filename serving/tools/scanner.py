"""One JSON object with a name and arguments, read while a model still writes it.

The arguments come out as the model wrote them, piece by piece, so that a long one can be streamed.
Used by `calls.py`.
"""

import json

ARGUMENT_KEYS = ("arguments", "parameters")


class CallScanner:
    """Takes characters from the first brace on; blanks may stand before it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False  # no object of this kind, or none at all
        self._raw: list[str] = []
        self._arguments: list[str] = []  # not told yet
        self._has_arguments = False
        self._key = ""
        self._part: list[str] = []  # of the key or value being read, if not of the arguments
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def is_call(self) -> bool:
        """Whether it is known to be a call: its name is there, and its arguments have begun."""
        return self.name is not None and (self._has_arguments or self.is_done)

    @property
    def raw(self) -> str:
        """All that was taken."""
        return "".join(self._raw)

    def feed(self, text: str) -> int:
        """Take characters until the object is done or broken; how many were taken."""
        for count, char in enumerate(text):
            if self.is_done or self.is_broken:
                return count
            self._take(char)
        return len(text)

    def take_arguments(self) -> str:
        """Give what is new of the arguments."""
        text = "".join(self._arguments)
        self._arguments.clear()
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        return text

    def _take(self, char: str) -> None:
        self._raw.append(char)
        if not self._depth and char.isspace():
            return
        was_inside = self._depth
        is_mark = not self._in_string
        self._follow_strings(char)
        if is_mark and char in "{[":
            self._depth += 1
        elif is_mark and char in "}]":
            self._depth -= 1
        if self._depth <= 0:
            self._end_value()
            self.is_done = not self.is_broken
            self.is_broken |= char != "}" or self.name is None
        elif was_inside == 0:
            self.is_broken = char != "{"
        elif is_mark and was_inside == self._depth == 1 and char in ":,":
            self._end_key() if char == ":" else self._end_value()
        else:
            self._take_part(char)

    def _follow_strings(self, char: str) -> None:
        if not self._in_string:
            self._in_string = char == '"'
        elif self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        else:
            self._in_string = char != '"'

    def _take_part(self, char: str) -> None:
        if self._key not in ARGUMENT_KEYS:
            self._part.append(char)
        elif self._arguments or self._has_arguments or not char.isspace():
            # Blanks after the value are dropped with the comma or brace that ends it.
            self.is_broken |= not self._has_arguments and char != "{"
            self._has_arguments = True
            if self._depth > 1 or char == "}":
                self._arguments.append(char)

    def _end_key(self) -> None:
        self._key = _read_text(self._part) or ""
        self._part = []
        self.is_broken |= self._key in ARGUMENT_KEYS and self._has_arguments

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _read_text(self._part)
            self.is_broken |= self.name is None
        self._key, self._part = "", []


def _read_text(part: list[str]) -> str | None:
    try:
        value = json.loads("".join(part))
    except ValueError:
        return None
    return value if isinstance(value, str) else None
