"""The endpoints that open, change, save and close sessions; turns are completions and chats.

Thin, like `routes.py`, which adds these paths to its own.
"""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swiftjax.engine.async_session import AsyncSession
from swiftjax.engine.request import RequestOptions
from swiftjax.serving.caller import current_caller
from swiftjax.serving.http.bodies import (
    AppendBody,
    OpenSessionBody,
    RestoreBody,
    SaveBody,
    SessionBody,
)
from swiftjax.serving.http.gated import Endpoint
from swiftjax.serving.http.json_body import FieldError, read_body
from swiftjax.serving.http.reading import read_messages, read_streaming
from swiftjax.serving.http.replies import JsonReply
from swiftjax.serving.messages import check_text
from swiftjax.serving.served import Served
from swiftjax.serving.session_desk import (
    delete_session,
    find_session,
    restore_session,
    save_session,
)


class SessionRoutes:
    """Sessions over HTTP; each caller has its own."""

    def __init__(self, served: Callable[[], Served]) -> None:
        self._served = served

    def paths(self) -> list[tuple[str, str, Endpoint]]:
        """All of it, to be let in by the gate."""
        return [
            ("POST", "/v1/sessions", self.open),
            ("POST", "/v1/sessions/append", self.append),
            ("POST", "/v1/sessions/fork", self.fork),
            ("POST", "/v1/sessions/close", self.close),
            ("POST", "/v1/sessions/save", self.save),
            ("POST", "/v1/sessions/restore", self.restore),
            ("POST", "/v1/sessions/delete", self.delete),
        ]

    async def open(self, request: Request) -> Response:
        """Open a session without text."""
        body = read_body(await request.body(), OpenSessionBody)
        session = self._served().engine.sessions.open(
            streaming=read_streaming(body.streaming),
            seed=body.seed,
            options=RequestOptions(cache_salt=body.cache_salt or ""),
            owner=current_caller().name,
        )
        return _describe(session)

    async def append(self, request: Request) -> Response:
        """Add to the text of a session."""
        body = read_body(await request.body(), AppendBody)
        session = self._find(request, body.session)
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("give exactly one of prompt and messages", "prompt")
        longest = session.text.longest
        if isinstance(body.prompt, str):
            check_text(len(body.prompt), longest)
        content = read_messages(body.messages or (), longest) if body.messages else body.prompt
        await session.append(content or (), turn_id=body.turn_id or "")
        return _describe(session)

    async def fork(self, request: Request) -> Response:
        """Open another session with the same text."""
        body = read_body(await request.body(), SessionBody)
        return _describe(await self._find(request, body.session).fork())

    async def close(self, request: Request) -> Response:
        """Close a session."""
        body = read_body(await request.body(), SessionBody)
        self._find(request, body.session).close()
        return JsonReply({"id": body.session, "object": "session", "closed": True})

    async def save(self, request: Request) -> Response:
        """Write a session to a file in the server's folder."""
        body = read_body(await request.body(), SaveBody)
        owner = current_caller().name
        await save_session(self._served(), body.session, body.name, owner)
        return _describe(self._find(request, body.session))

    async def restore(self, request: Request) -> Response:
        """Open a session from such a file."""
        body = read_body(await request.body(), RestoreBody)
        owner = current_caller().name
        return _describe(await restore_session(self._served(), body.name, owner))

    async def delete(self, request: Request) -> Response:
        """Delete such a file."""
        body = read_body(await request.body(), RestoreBody)
        await delete_session(self._served(), body.name, current_caller().name)
        return JsonReply({"name": body.name, "object": "session", "deleted": True})

    def _find(self, request: Request, session_id: str) -> AsyncSession:
        return find_session(self._served(), session_id, current_caller().name)


def _describe(session: AsyncSession) -> JsonReply:
    fields: dict[str, Any] = {"id": session.session_id, "object": "session"}
    return JsonReply(fields | {"num_tokens": len(session)})
