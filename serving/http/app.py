"""What surrounds every HTTP request: its id, the key, the body, errors, and clients that leave.

Deny by default: a path is open without a key only if OPEN_PATHS has it, whatever is routed. The
application is plain ASGI around Starlette's router. Made by `http_server.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftjax.errors import ForbiddenError, InvalidRequestError
from swiftjax.serving.access_log import log_call, request_id_from
from swiftjax.serving.body_room import BodyRoom, Held
from swiftjax.serving.caller import Caller, set_caller
from swiftjax.serving.http.errors import ClientGone, describe
from swiftjax.serving.http.protocol import MAX_HEADER_BYTES
from swiftjax.serving.http.replies import JsonReply
from swiftjax.serving.keys import KeyRing
from swiftjax.serving.metrics import Metrics

OPEN_PATHS = frozenset(("/health", "/ready"))
MAX_BODY_BYTES = 16 * 2**20
# A client that sends slower than this is not sending.
BODY_SECONDS = 60.0
CLIENT_GONE = 499  # a status for the log: nobody was there to be sent one


def make_app(
    router: Router, keys: KeyRing, metrics: Metrics, allowed_origins: Sequence[str]
) -> ASGIApp:
    """Put everything around a router; `allowed_origins` are those of web pages that may call."""
    app: ASGIApp = FrontDoor(router, keys, metrics, frozenset(allowed_origins))
    if allowed_origins:
        # Outermost, because browsers ask without a key whether they may ask.
        app = CORSMiddleware(
            app,
            allow_origins=list(allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "x-swiftjax-prefix-hash", "retry-after"],
        )
    return app


class FrontDoor:
    """One request from its first header to its last byte."""

    def __init__(
        self, router: Router, keys: KeyRing, metrics: Metrics, allowed_origins: frozenset[str]
    ) -> None:
        self._router = router
        self._keys = keys
        self._metrics = metrics
        self._allowed_origins = allowed_origins
        self._room = BodyRoom()
        self._post_paths = {
            route.path
            for route in router.routes
            if isinstance(route, Route) and "POST" in (route.methods or ())
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; nothing but a cancellation comes out of here."""
        begun = time.monotonic()
        request_id = request_id_from(Headers(scope=scope).get("x-request-id", ""))
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            # The router raises, rather than answers, what belongs to an application.
            await self._answer({**scope, "app": self}, receive, send_with_id)
        except ClientGone:
            status = CLIENT_GONE
        except Exception as error:
            if not isinstance(error, HTTPException):
                self._metrics.count_error(error, "http")
            reply = describe(error)
            if status is None:
                response = JsonReply(reply.body, status=reply.status, headers=reply.headers)
                await response(scope, receive, send_with_id)
        finally:
            log_call(
                protocol="http",
                call=f"{scope['method']} {scope['path']}",
                status=str(status or CLIENT_GONE),
                request_id=request_id,
                seconds=time.monotonic() - begun,
            )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise HTTPException(431, f"at most {MAX_HEADER_BYTES} bytes of headers are taken")
        caller = self._check_caller(request)
        parent = request.headers.get("traceparent", "")
        set_caller(caller._replace(trace_parent=parent))
        takes_body = request.method == "POST" and scope["path"] in self._post_paths
        with self._room.holding() as held:
            body = await _read_body(request, receive, held) if takes_body else b""
            await _while_connected(self._router(scope, _replay(body), send), receive)

    def _check_caller(self, request: Request) -> Caller:
        """Let the caller in, or raise."""
        if request.scope["path"] in OPEN_PATHS:
            return Caller()
        authorization = request.headers.get("authorization")
        sent = None if authorization is None else authorization.encode("latin-1")
        caller = self._keys.check(sent)
        origin = request.headers.get("origin")
        if self._keys.is_open and origin not in (None, *self._allowed_origins):
            # Else any web page that its user has open could make this machine work for it.
            raise ForbiddenError("pages of this origin may not call: see --allowed-origins")
        return caller


async def _read_body(request: Request, receive: Receive, held: Held) -> bytes:
    """Read the body, giving up as soon as it is known to be too large or no JSON."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(415, "the body must be JSON: send 'Content-Type: application/json'")
    declared = request.headers.get("content-length", "0")
    if int(declared) > MAX_BODY_BYTES:
        raise _too_large(declared)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                held.add(len(parts[-1]))
                if size > MAX_BODY_BYTES:
                    raise _too_large(f"over {MAX_BODY_BYTES}")
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise InvalidRequestError(f"the body took over {BODY_SECONDS:g} s to arrive") from None


def _too_large(size: str) -> HTTPException:
    return HTTPException(413, f"the body has {size} bytes; at most {MAX_BODY_BYTES} are taken")


def _replay(body: bytes) -> Receive:
    """A `receive` for those inside, who get the body whole and need not watch the client."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _while_connected(work: Awaitable[Any], receive: Receive) -> None:
    """Do the work unless the client goes away: then cancel it and raise ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
