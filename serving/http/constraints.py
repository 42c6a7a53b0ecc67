"""What an answer must look like, from the fields of a body that may say so: one of them at most."""

from typing import Any

import msgspec

from swiftjax.engine.constraint import Constraint
from swiftjax.serving.http.bodies import Options, ResponseFormat, StructuredOutputs
from swiftjax.serving.http.json_body import FieldError


def read_constraint(body: Options, of_tools: Constraint | None) -> Constraint | None:
    """Read the constraint; `of_tools` is what the tools ask for. Raises InvalidRequestError."""
    found = [] if of_tools is None else [of_tools]
    if body.response_format is not None:
        found += _of_format(body.response_format)
    if body.structured_outputs is not None:
        found += _of_structured(body.structured_outputs)
    if len(found) > 1:
        param = "response_format" if body.structured_outputs is None else "structured_outputs"
        also = "" if of_tools is None else " (calls of tools, demanded or strict, are one)"
        raise FieldError(f"several constraints are set{also}: an answer takes one", param)
    return found[0] if found else None


def _of_format(asked: ResponseFormat) -> list[Constraint]:
    if asked.type == "text":
        return []
    if asked.type == "json_object":
        return [Constraint(kind="json_object")]
    if asked.json_schema is None:
        raise FieldError("response_format.json_schema is missing", "response_format")
    return [Constraint(kind="json_schema", text=_schema_text(asked.json_schema.schema))]


def _of_structured(asked: StructuredOutputs) -> list[Constraint]:
    found = []
    if asked.json is not None:
        found.append(Constraint(kind="json_schema", text=_schema_text(asked.json)))
    if asked.json_object:
        found.append(Constraint(kind="json_object"))
    if asked.regex is not None:
        found.append(Constraint(kind="regex", text=asked.regex))
    if asked.grammar is not None:
        found.append(Constraint(kind="grammar", text=asked.grammar))
    if asked.choice is not None:
        found.append(Constraint(kind="choice", choices=tuple(asked.choice)))
    if not found:
        raise FieldError("structured_outputs: set one of its fields", "structured_outputs")
    return found


def _schema_text(schema: dict[str, Any] | bool) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        raise FieldError("the schema nests too deeply") from None
