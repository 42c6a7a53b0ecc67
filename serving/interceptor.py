"""What surrounds every call: the key, and for ours parsing, the gate and errors as statuses.

Left to itself, grpc.aio answers any exception with UNKNOWN and its text, and so it does with bytes
that are no message. Here errors raised on purpose go through `status.py`, and anything else is a
bug: its text stays in the log under an id, and the id is all the client sees.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError

from swiftjax.errors import (
    EngineSilentError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    SlowReaderError,
    SwiftJaxError,
)
from swiftjax.serving.access_log import log_call
from swiftjax.serving.body_room import BodyRoom
from swiftjax.serving.caller import Caller, set_caller
from swiftjax.serving.gate import Gate
from swiftjax.serving.incidents import report_bug
from swiftjax.serving.keys import KeyRing
from swiftjax.serving.metrics import Metrics
from swiftjax.serving.status import grpc_status

OUR_METHODS = ("/swiftjax.", "/vllm.grpc.engine.")
OPEN_METHODS = "/grpc.health.v1."  # answered without a key
GATEWAY = "/vllm.grpc.engine.VllmEngine/"
ADMIN_METHODS = ("/swiftjax.v1.AdminService/", f"{GATEWAY}FlushCache")  # need an admin key
# Answered whether or not the gate is open.
UNGATED_METHODS = (
    "/swiftjax.v1.AdminService/",
    *(f"{GATEWAY}{name}" for name in ("HealthCheck", "Abort", "GetLoads", "GetServerInfo")),
)
# How long a client is asked to wait whose call found the queue full or the engine silent; the
# header is gRPC's own.
RETRY_PUSHBACK = (("grpc-retry-pushback-ms", "1000"),)

LAST_WORD_SECONDS = 1.0

Context = grpc.aio.ServicerContext
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps our handlers, which are coroutines; a streaming one writes to the context."""

    def __init__(self, gate: Gate, keys: KeyRing, metrics: Metrics) -> None:
        self._gate = gate
        self._keys = keys
        self._metrics = metrics
        self._room = BodyRoom()
        self._ending: set[asyncio.Task[NoReturn]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Refuse a call without a key; replace the handler of one of our methods."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        caller = Caller()
        if not method.startswith(OPEN_METHODS):
            metadata: Any = handler_call_details.invocation_metadata or ()
            try:
                caller = self._check_caller(metadata, method)
            except SwiftJaxError as error:
                log_call(
                    protocol="grpc",
                    call=method,
                    status=self._count(error),
                    request_id=uuid.uuid4().hex,
                    seconds=0.0,
                )
                return _refusal(handler, method, error)
        if handler is None or not method.startswith(OUR_METHODS):
            return handler
        if handler.response_streaming:
            inner, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        else:
            inner, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        parse: Any = handler.request_deserializer

        async def behaviour(data: bytes, context: Context) -> Any:
            set_caller(caller)
            try:
                return await self._call(cast(Behaviour, inner), parse, data, context, method)
            except grpc.aio.InternalError:
                # Nothing can be sent because the client has just gone; grpc has not told us yet.
                raise asyncio.CancelledError from None

        return make(cast(Any, behaviour), None, handler.response_serializer)

    def _check_caller(self, metadata: Any, method: str) -> Caller:
        """Let the caller in, or raise."""
        sent = _find(metadata, "authorization")
        caller = self._keys.check(sent, for_admin=method.startswith(ADMIN_METHODS))
        parent = _find(metadata, "traceparent") or b""
        return caller._replace(trace_parent=parent.decode("latin-1"))

    async def _call(
        self,
        inner: Behaviour,
        parse: Callable[[bytes], Any],
        data: bytes,
        context: Context,
        method: str,
    ) -> Any:
        begun = time.monotonic()
        request_id, status = "", grpc.StatusCode.CANCELLED.name
        try:
            is_ungated = method.startswith(UNGATED_METHODS)
            with nullcontext() if is_ungated else self._gate.passing():
                try:
                    with self._room.holding(0 if is_ungated else len(data)):
                        request = _parse(parse, data)
                        if hasattr(request, "request_id"):
                            # The id that the engine and the answer have too.
                            request.request_id = request.request_id or uuid.uuid4().hex
                            request_id = request.request_id
                        answer = await inner(request, context)
                        status = grpc.StatusCode.OK.name
                        return answer
                except grpc.aio.InternalError:
                    raise
                except SlowReaderError as error:
                    status = self._count(error)
                    await self._abort_soon(context, method, error)
                except Exception as error:
                    # Inside, so that a drain waits until the client was told.
                    status = self._count(error)
                    await _abort(context, method, error)
        except NotReadyError as error:
            status = self._count(error)
            await _abort(context, method, error)
        finally:
            log_call(
                protocol="grpc",
                call=method,
                status=status,
                request_id=request_id or uuid.uuid4().hex,
                seconds=time.monotonic() - begun,
            )

    async def _abort_soon(self, context: Context, method: str, error: Exception) -> None:
        """Abort, but do not wait for long: the status is behind what the client does not read."""
        ending = asyncio.create_task(_abort(context, method, error))
        self._ending.add(ending)
        ending.add_done_callback(self._forget)
        done, _ = await asyncio.wait({ending}, timeout=LAST_WORD_SECONDS)
        if done:
            ending.result()  # raises, as grpc's abort does

    def _forget(self, ending: "asyncio.Task[NoReturn]") -> None:
        self._ending.discard(ending)
        if not ending.cancelled():
            ending.exception()  # that of grpc, by which handlers end

    def _count(self, error: Exception) -> str:
        self._metrics.count_error(error, "grpc")
        known = isinstance(error, SwiftJaxError)
        return grpc_status(error)[0].name if known else grpc.StatusCode.INTERNAL.name


def _find(metadata: Iterable[tuple[str, str | bytes]], wanted: str) -> bytes | None:
    for name, value in metadata:
        if name == wanted:
            return value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    return None


def _refusal(
    handler: grpc.RpcMethodHandler | None, method: str, error: SwiftJaxError
) -> grpc.RpcMethodHandler:
    """A handler that gives one error, whatever is called and however it streams."""

    async def refuse(_: Any, context: Context) -> None:
        await _abort(context, method, error)

    if handler is not None and handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(cast(Any, refuse))
    if handler is not None and handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(cast(Any, refuse))
    return grpc.unary_unary_rpc_method_handler(cast(Any, refuse))


def _parse(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        raise InvalidRequestError(
            f"the request's {len(data)} bytes are not the message this method takes"
        ) from None


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    if not isinstance(error, SwiftJaxError):
        await context.abort(grpc.StatusCode.INTERNAL, report_bug(method, error))
    status, details = grpc_status(error)
    metadata = RETRY_PUSHBACK if isinstance(error, QueueFullError | EngineSilentError) else ()
    await context.abort(status, details, metadata)
