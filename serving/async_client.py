"""A small client of swiftjax.v1 for asyncio; `client.py` is its blocking counterpart.

Raises the errors the server meant (`status.py`). A call that finds no server is tried again before
its first message (`client_channel.py`). Loads grpc but not jax.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc

from swiftjax.engine.request import NO_OPTIONS, GenerationConfig, RequestOptions
from swiftjax.engine.streaming import Streaming
from swiftjax.serving.asking import make_open_session, make_request, make_tokenize
from swiftjax.serving.client_channel import open_async_channel
from swiftjax.serving.messages import ChatMessages, Delta, read_response
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.status import error_from_status


class AsyncClient:
    """One connection to a server, made inside an event loop; close it or use `async with`."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`credentials` are those of `grpc.ssl_channel_credentials`; without, nothing is secret."""
        self._channel = open_async_channel(target, credentials)
        self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)  # typed for blocking calls
        self._sessions: Any = pb_grpc.SessionServiceStub(self._channel)  # likewise
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connection and every call on it."""
        await self._channel.close()

    async def generate(
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
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer to one of text, chat messages or token ids.

        Of a `session` that is the next turn, whose prompt may be left out.

        Closing the generator cancels the call. Without a config the server's defaults hold. Raises
        DeadlineError when the answer is not complete after `timeout` seconds.
        """
        request = make_request(text, messages, token_ids, config, options, request_id, session)
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        try:
            async for response in call:
                yield read_response(response)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error.code(), error.details()) from None
        finally:
            call.cancel()

    async def open_session(
        self, streaming: Streaming | None = None, seed: int | None = None
    ) -> str:
        """Open a session, for `generate`, and return its id."""
        request = make_open_session(streaming, seed)
        return (await self._call(self._sessions.OpenSession, request)).session

    async def fork_session(self, session: str) -> str:
        """Open another session with the same text and return its id."""
        request = pb.ForkSessionRequest(session=session)
        return (await self._call(self._sessions.ForkSession, request)).session

    async def close_session(self, session: str) -> None:
        """Close a session; raises NotFoundError if it is not open."""
        request = pb.CloseSessionRequest(session=session)
        await self._call(self._sessions.CloseSession, request)

    async def tokenize(
        self, *, text: str | None = None, messages: ChatMessages | None = None
    ) -> list[int]:
        """Give the token ids that `generate` would use for one of text or chat messages."""
        response = await self._call(self._stub.Tokenize, make_tokenize(text, messages))
        return list(response.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Give the text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._stub.Detokenize, request)).text

    async def get_model(self) -> pb.GetModelResponse:
        """Describe the model that is served."""
        return await self._call(self._stub.GetModel, pb.GetModelRequest())

    async def _call(self, method: Any, request: object) -> Any:
        try:
            return await method(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error.code(), error.details()) from None
