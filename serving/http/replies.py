"""Whole answers as JSON. Used by every endpoint and for errors."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response


class JsonReply(Response):
    """A value as JSON; must not be cached by anyone between."""

    media_type = "application/json"

    def __init__(
        self, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            msgspec.json.encode(value),
            status_code=status,
            headers={"cache-control": "no-store", **(headers or {})},
        )
