"""A small blocking client for swiftjax.v1; the `demo` command is its first user.

Raises the errors the server meant (`status.py`). Loads grpc but not jax.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swiftjax.engine.request import NO_OPTIONS, GenerationConfig, RequestOptions
from swiftjax.errors import DeadlineError, InvalidRequestError
from swiftjax.serving.client_channel import open_channel
from swiftjax.serving.messages import (
    ChatMessages,
    Delta,
    read_response,
)
from swiftjax.serving.options import write_options, write_request_options
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
        timeout: float | None = None,
    ) -> Iterator[Delta]:
        """Stream the answer to one of text, chat messages or token ids.

        Closing the iterator cancels the call. Without a config the server's defaults hold. Raises
        DeadlineError when the answer is not complete after `timeout` seconds.
        """
        request = pb.GenerateRequest(request_id=request_id)
        if sum(prompt is not None for prompt in (text, messages, token_ids)) != 1:
            raise InvalidRequestError("give exactly one of text, messages and token_ids")
        if text is not None:
            request.text = text
        elif messages is not None:
            request.chat.CopyFrom(_chat(messages))
        elif token_ids is not None:
            request.token_ids.ids.extend(token_ids)
            request.token_ids.SetInParent()
        if config is not None:
            write_options(config, request)
        write_request_options(options, request)
        call = self._stub.Generate(request, timeout=timeout)
        try:
            for response in call:
                yield read_response(response)
        except grpc.RpcError as error:
            raise error_from_status(error.code(), error.details()) from None
        finally:
            call.cancel()

    def tokenize(
        self, *, text: str | None = None, messages: ChatMessages | None = None
    ) -> list[int]:
        """Give the token ids that `generate` would use for one of text or chat messages."""
        if (text is None) == (messages is None):
            raise InvalidRequestError("give exactly one of text and messages")
        if messages is not None:
            request = pb.TokenizeRequest(chat=_chat(messages))
        else:
            request = pb.TokenizeRequest(text=text)
        return list(_call(self._stub.Tokenize, request).token_ids)

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


def _chat(messages: ChatMessages) -> pb.Chat:
    return pb.Chat(
        messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    )


def _call(method: "grpc.UnaryUnaryMultiCallable[Message, Response]", request: Message) -> Response:
    try:
        return method(request)
    except grpc.RpcError as error:
        raise error_from_status(error.code(), error.details()) from None
