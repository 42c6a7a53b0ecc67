"""A gRPC channel as our clients use it: patient limits, retries, an API key on every call, TLS.

A call that no server took is tried again by grpc itself, which can do so until the first message of
the answer has come. Nothing else is: a second try would compute everything again.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from swiftjax.serving.addresses import is_loopback
from swiftjax.serving.messages import MAX_MESSAGE_BYTES

RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "swiftjax.v1.GenerationService"}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
CHANNEL_OPTIONS = (
    ("grpc.service_config", json.dumps(RETRIES)),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A server that is being waited for should be found soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def open_channel(
    target: str, api_key: str | None, credentials: grpc.ChannelCredentials | None
) -> grpc.Channel:
    """Open a channel; without credentials it is not encrypted."""
    options = _options(target)
    if credentials is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        channel = grpc.secure_channel(target, credentials, options=options)
    return channel if api_key is None else grpc.intercept_channel(channel, _KeySender(api_key))


def open_async_channel(
    target: str, credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    """Open a channel of the running event loop; its calls take the key as metadata."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=_options(target))
    return grpc.aio.secure_channel(target, credentials, options=_options(target))


def _options(target: str) -> tuple[tuple[str, Any], ...]:
    # A proxy of the environment (http_proxy) cannot reach this machine's own ports.
    host = target.rpartition(":")[0].strip("[]")
    proxy = (("grpc.enable_http_proxy", 0),) if is_loopback(host) else ()
    return (*CHANNEL_OPTIONS, *proxy)


class _Details(NamedTuple):
    """A call's details with other metadata; grpc has no class for it."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _KeySender(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, api_key: str) -> None:
        self._entry = ("authorization", f"Bearer {api_key}")

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Send the key along."""
        return continuation(self._with_key(client_call_details), request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Send the key along."""
        return continuation(self._with_key(client_call_details), request)

    def _with_key(self, details: Any) -> _Details:
        return _Details(
            method=details.method,
            timeout=details.timeout,
            metadata=[*(details.metadata or ()), self._entry],
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )
