"""Endpoints that are answered only while the server is ready, and that a drain waits for."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swiftjax.serving.gate import Gate

Endpoint = Callable[[Request], Awaitable[Response]]


class Gated:
    """An endpoint that is inside the gate until its answer is sent, streamed or not."""

    def __init__(self, endpoint: Endpoint, gate: Gate) -> None:
        self._endpoint = endpoint
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises NotReadyError while the gate is closed."""
        with self._gate.passing():
            response = await self._endpoint(Request(scope, receive))
            await response(scope, receive, send)
