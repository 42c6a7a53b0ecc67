"""The OpenAPI document, made from the types that requests are checked against."""

from functools import cache
from typing import Any

import msgspec

from swiftjax import __version__
from swiftjax.serving.http.bodies import (
    AppendBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    OpenSessionBody,
    RestoreBody,
    SaveBody,
    SessionBody,
    TokenizeBody,
)

_POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/completions": (CompletionBody, "Continue one or several prompts"),
    "/v1/chat/completions": (ChatBody, "Answer a conversation"),
    "/v1/sessions": (OpenSessionBody, "Open a session"),
    "/v1/sessions/append": (AppendBody, "Add to the text of a session"),
    "/v1/sessions/fork": (SessionBody, "Open another session with the same text"),
    "/v1/sessions/close": (SessionBody, "Close a session"),
    "/v1/sessions/save": (SaveBody, "Write a session to a file"),
    "/v1/sessions/restore": (RestoreBody, "Open a session from a file"),
    "/v1/sessions/delete": (RestoreBody, "Delete such a file"),
    "/tokenize": (TokenizeBody, "Turn a text or a chat into token ids"),
    "/detokenize": (DetokenizeBody, "Turn token ids into text"),
}
_GETS = {
    "/v1/models": "The model that is served",
    "/v1/models/{model}": "The same, if it has this name",
    "/tokenizer_info": "The special tokens",
    "/health": "Whether the process answers",
    "/ready": "Whether requests are taken",
    "/metrics": "Metrics in Prometheus' text form",
    "/version": "The server's version",
    "/openapi.json": "This document",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def make_document() -> dict[str, Any]:
    """Describe every path but the answers' fields, which are OpenAI's."""
    kinds = [kind for kind, _ in _POSTS.values()]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in _GETS.items()}
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    for path, (kind, text) in _POSTS.items():
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        content = {"application/json": {"schema": schema}}
        paths[path] = {"post": _operation(text) | {"requestBody": {"content": content}}}
    for path in ("/health", "/ready"):
        paths[path]["get"]["security"] = []
    return {
        "openapi": "3.1.0",
        "info": {"title": "SwiftJAX", "version": __version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(text: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": text,
        "responses": {
            "200": {"description": "The answer"},
            "default": {"description": "An error", "content": error},
        },
    }
