"""What surrounds every call of ours: parsing, the gate, and turning exceptions into statuses.

Left to itself, grpc.aio answers any exception with UNKNOWN and its text, and so it does with bytes
that are no message. Here errors raised on purpose go through `status.py`, and anything else is a
bug: its text stays in the log under an id, and the id is all the client sees.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError

from swiftjax.errors import InvalidRequestError, QueueFullError, SwiftJaxError
from swiftjax.serving.gate import Gate
from swiftjax.serving.status import grpc_status

logger = logging.getLogger(__name__)

OUR_METHODS = "/swiftjax."
# How long a client whose call found the queue full is asked to wait (gRPC's own retry header).
RETRY_PUSHBACK = (("grpc-retry-pushback-ms", "1000"),)

Context = grpc.aio.ServicerContext
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps our handlers, which are coroutines; a streaming one writes to the context."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Replace the handler of one of our methods; health and reflection stay as they are."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OUR_METHODS):
            return handler
        if handler.response_streaming:
            inner, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        else:
            inner, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        parse: Any = handler.request_deserializer

        async def behaviour(data: bytes, context: Context) -> Any:
            try:
                return await self._call(cast(Behaviour, inner), parse, data, context, method)
            except grpc.aio.InternalError:
                # Nothing can be sent because the client has just gone; grpc has not told us yet.
                raise asyncio.CancelledError from None

        return make(cast(Any, behaviour), None, handler.response_serializer)

    async def _call(
        self,
        inner: Behaviour,
        parse: Callable[[bytes], Any],
        data: bytes,
        context: Context,
        method: str,
    ) -> Any:
        try:
            with self._gate.passing():
                return await inner(_parse(parse, data), context)
        except grpc.aio.InternalError:
            raise
        except Exception as error:
            await _abort(context, method, error)


def _parse(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        raise InvalidRequestError(
            f"the request's {len(data)} bytes are not the message this method takes"
        ) from None


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    if not isinstance(error, SwiftJaxError):
        error_id = uuid.uuid4().hex[:16]
        logger.error("error %s in %s", error_id, method, exc_info=error)
        details = f"internal error {error_id}; the server's log has the details"
        await context.abort(grpc.StatusCode.INTERNAL, details)
    status, details = grpc_status(error)
    metadata = RETRY_PUSHBACK if isinstance(error, QueueFullError) else ()
    await context.abort(status, details, metadata)
