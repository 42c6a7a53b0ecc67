"""A small blocking client for swiftjax.v1; `async_client.py` is its counterpart for asyncio.

Raises the errors the server meant (`status.py`). A call that finds no server is tried again before
its first message (`client_channel.py`). Loads grpc but not jax.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swiftjax.engine.request import NO_OPTIONS, GenerationConfig, RequestOptions
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import DeadlineError
from swiftjax.serving.asking import make_open_session, make_request, make_tokenize
from swiftjax.serving.client_channel import open_channel
from swiftjax.serving.messages import ChatMessages, Delta, read_response
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.status import error_from_status

Response = TypeVar("Response", bound=Message)


class Client:
    """One connection to a server, e.g. `Client("127.0.0.1:50051")`; close it or use `with`."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`credentials` are those of `grpc.ssl_channel_credentials`; without, nothing is secret."""
        self._channel = open_channel(target, api_key, credentials)
        self._stub = pb_grpc.GenerationServiceStub(self._channel)
        self._sessions = pb_grpc.SessionServiceStub(self._channel)
        health: Any = health_pb2_grpc.HealthStub(self._channel)  # its stub file lacks Watch
        self._watch = health.Watch

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection and every call on it."""
        self._channel.close()

    def generate(
        self,
        *,
        text: str | None = None,
        messages: ChatMessages | None = None,
        token_ids: Sequence[int] | None = None,
        config: GenerationConfig | None = None,
        options: RequestOptions = NO_OPTIONS,
        request_id: str = "",
        session: str = "",
        timeout: float | None = None,
    ) -> Iterator[Delta]:
        """Stream the answer to one of text, chat messages or token ids.

        Of a `session` that is the next turn, whose prompt may be left out.

        Closing the iterator cancels the call. Without a config the server's defaults hold. Raises
        DeadlineError when the answer is not complete after `timeout` seconds.
        """
        request = make_request(text, messages, token_ids, config, options, request_id, session)
        call = self._stub.Generate(request, timeout=timeout)
        try:
            for response in call:
                yield read_response(response)
        except grpc.RpcError as error:
            raise error_from_status(error.code(), error.details()) from None
        finally:
            call.cancel()

    def open_session(self, streaming: Streaming | None = None, seed: int | None = None) -> str:
        """Open a session, for `generate`, and return its id."""
        return _call(self._sessions.OpenSession, make_open_session(streaming, seed)).session

    def fork_session(self, session: str) -> str:
        """Open another session with the same text and return its id."""
        return _call(self._sessions.ForkSession, pb.ForkSessionRequest(session=session)).session

    def close_session(self, session: str) -> None:
        """Close a session; raises NotFoundError if it is not open."""
        _call(self._sessions.CloseSession, pb.CloseSessionRequest(session=session))

    def tokenize(
        self, *, text: str | None = None, messages: ChatMessages | None = None
    ) -> list[int]:
        """Give the token ids that `generate` would use for one of text or chat messages."""
        return list(_call(self._stub.Tokenize, make_tokenize(text, messages)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Give the text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return _call(self._stub.Detokenize, request).text

    def get_model(self) -> pb.GetModelResponse:
        """Describe the model that is served."""
        return _call(self._stub.GetModel, pb.GetModelRequest())

    def wait_until_serving(self, timeout: float) -> None:
        """Return when the server's health says SERVING; DeadlineError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            request = health_pb2.HealthCheckRequest()
            watch = self._watch(request, timeout=left, wait_for_ready=True)
            try:
                for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.RpcError as error:
                # UNAVAILABLE: the server went away; another may come up on the same address.
                known = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                if error.code() not in known:
                    raise error_from_status(error.code(), error.details()) from None
                time.sleep(0.05)
            finally:
                watch.cancel()
        raise DeadlineError(f"the server is not SERVING after {timeout:g} s")


def _call(method: "grpc.UnaryUnaryMultiCallable[Message, Response]", request: Message) -> Response:
    try:
        return method(request)
    except grpc.RpcError as error:
        raise error_from_status(error.code(), error.details()) from None
