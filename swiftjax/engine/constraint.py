"""What an answer must look like, as a client says it: sizes are checked, meaning is not.

`grammar.py` compiles it, away from the engine's thread. Part of a GenerationConfig.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from swiftjax.engine.checks import check_count
from swiftjax.errors import InvalidRequestError

ConstraintKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "tool_calls"]

MAX_SCHEMA_BYTES = 64 * 2**10
MAX_REGEX_BYTES = 4 * 2**10
MAX_CHOICES = 1000
_MAX_BYTES = {
    "json_schema": MAX_SCHEMA_BYTES,
    "json_object": 0,
    "regex": MAX_REGEX_BYTES,
    "grammar": MAX_SCHEMA_BYTES,
    "choice": 0,
    "tool_calls": MAX_SCHEMA_BYTES,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """The answer is a JSON value of a schema, any JSON object, a match of a regex, a sentence of a
    grammar in Lark's notation, one of some texts, or calls of tools (a grammar as well).

    `text` is the schema, the regex or the grammar. Raises InvalidRequestError for what is too
    large or empty.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise InvalidRequestError(f"constraint {self.kind!r:.80} is not known")
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > _MAX_BYTES[self.kind]:
            raise InvalidRequestError(
                f"{self.kind} has {size} bytes; at most {_MAX_BYTES[self.kind]} are taken"
            )
        if not self.text and _MAX_BYTES[self.kind]:
            raise InvalidRequestError(f"{self.kind} is empty")
        if (self.kind == "choice") != bool(self.choices):
            raise InvalidRequestError("choice needs at least one text, and only choice has them")
        check_count("choices", len(self.choices), MAX_CHOICES)
        if sum(len(choice) for choice in self.choices) > MAX_SCHEMA_BYTES or "" in self.choices:
            raise InvalidRequestError(
                f"choices must be non-empty and have at most {MAX_SCHEMA_BYTES} characters in all"
            )
