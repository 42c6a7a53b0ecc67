"""The endpoints over an AsyncEngine. Thin: `reading.py` and `writing.py` do the translating.

Every method sees a whole body and is cancelled when its client goes away (`app.py`).
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from swiftjax import __version__
from swiftjax.engine.async_session import AsyncSession
from swiftjax.engine.chat_turns import Messages
from swiftjax.engine.request import Prompt
from swiftjax.errors import NotReadyError
from swiftjax.serving.caller import current_caller, turns_of
from swiftjax.serving.gate import Gate
from swiftjax.serving.http.bodies import (
    ChatBody,
    CompletionBody,
    Options,
)
from swiftjax.serving.http.errors import ErrorReply, describe
from swiftjax.serving.http.gated import Endpoint, Gated
from swiftjax.serving.http.json_body import FieldError, read_body
from swiftjax.serving.http.openapi import make_document
from swiftjax.serving.http.prompts import encode, render
from swiftjax.serving.http.reading import (
    Asked,
    prefix_hash,
    read_chat,
    read_completion,
    read_messages,
    read_streaming,
)
from swiftjax.serving.http.replies import JsonReply
from swiftjax.serving.http.session_routes import SessionRoutes
from swiftjax.serving.http.streams import EventStream
from swiftjax.serving.http.token_routes import TokenRoutes
from swiftjax.serving.http.tools import read_tools
from swiftjax.serving.http.writing import AnswerWriter, ChatWriter, CompletionWriter
from swiftjax.serving.merging import Outputs, merge
from swiftjax.serving.messages import check_model
from swiftjax.serving.metrics import CONTENT_TYPE, Metrics
from swiftjax.serving.served import Served
from swiftjax.serving.session_desk import find_session


class Routes:
    """The endpoints of one server. `served` is set before the gate lets the first request in."""

    served: Served

    def __init__(self, gate: Gate, metrics: Metrics) -> None:
        self._gate = gate
        self._metrics = metrics
        self._started = int(time.time())

    def router(self) -> Router:
        """Give the paths; whatever needs the model waits for the gate."""
        gated: list[tuple[str, str, Endpoint]] = [
            ("GET", "/v1/models", self.list_models),
            ("GET", "/v1/models/{model:path}", self.get_model),
            ("POST", "/v1/completions", self.complete),
            ("POST", "/v1/chat/completions", self.chat),
            *TokenRoutes(lambda: self.served).paths(),
            *SessionRoutes(lambda: self.served).paths(),
        ]
        always: list[tuple[str, str, Endpoint]] = [
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/metrics", self.metrics),
            ("GET", "/version", self.version),
            ("GET", "/openapi.json", self.openapi),
        ]
        routes = [Route(path, Gated(f, self._gate), methods=[method]) for method, path, f in gated]
        routes += [Route(path, f, methods=[method]) for method, path, f in always]
        return Router(routes, redirect_slashes=False)

    async def complete(self, request: Request) -> Response:
        """Continue one or several prompts."""
        arrival = time.monotonic()
        body = read_body(await request.body(), CompletionBody)
        engine, model = self.served[:2]
        check_model(body.model or "", model.name)
        session = self._find(request, body.session)
        prompts, asked = read_completion(body, self._longest(body, session))
        prompt_ids: list[list[int]] = []
        if asked.config.echo and asked.config.logprobs is not None:
            prompt_ids = [await encode(engine.tokenizer, prompt) for prompt in prompts]
            asked = asked.late(time.monotonic() - arrival)
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        writer = CompletionWriter(
            answer_id, model.name, engine.tokenizer, asked.config, prompts, prompt_ids
        )
        return await self._answer(request, prompts, asked, answer_id, writer, session)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        arrival = time.monotonic()
        body = read_body(await request.body(), ChatBody)
        engine, model = self.served[:2]
        check_model(body.model or "", model.name)
        tools = read_tools(body, engine.tokenizer, self.served.tool_parser)
        asked = read_chat(body, tools)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        writer = ChatWriter(answer_id, model.name, engine.tokenizer, asked.config, tools)
        if (session := self._find(request, body.session)) is not None:
            if tools is not None:
                raise FieldError(
                    "tools do not go with a session: leave one of the two out", "tools"
                )
            turns = read_messages(body.messages, session.text.longest)
            return await self._answer(request, [turns], asked, answer_id, writer, session)
        longest = self._longest(body, None)
        ids = await render(engine.tokenizer, body.messages, longest, tools=tools and tools.offered)
        asked = asked.late(time.monotonic() - arrival)
        return await self._answer(request, [ids], asked, answer_id, writer)

    async def list_models(self, request: Request) -> Response:
        """Name the model that is served."""
        return JsonReply({"object": "list", "data": [self._describe()]})

    async def get_model(self, request: Request) -> Response:
        """Describe the model, if it is the one that is served."""
        check_model(request.path_params["model"] or "/", self.served.model.name)
        return JsonReply(self._describe())

    async def health(self, request: Request) -> Response:
        """Say that the process answers; it ends itself when its engine dies."""
        return JsonReply({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """Say whether requests are taken."""
        with self._gate.passing():
            if not self.served.engine.is_alive:
                raise NotReadyError("the engine has ended; restart the server")
            return JsonReply({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """Name the version of this server."""
        return JsonReply({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """Tell Prometheus."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        """Describe this interface."""
        return JsonReply(make_document())

    def _find(self, request: Request, session_id: str | None) -> AsyncSession | None:
        owner = current_caller().name
        return find_session(self.served, session_id, owner) if session_id else None

    def _longest(self, body: Options, session: AsyncSession | None) -> int:
        if session is not None:
            return session.text.longest
        return self.served.engine.limits.longest(read_streaming(body.streaming))

    def _streams(
        self,
        request: Request,
        prompts: Sequence[Prompt | Messages],
        asked: Asked,
        answer_id: str,
        session: AsyncSession | None,
    ) -> list[Outputs]:
        """An answer to each prompt; to what it adds to a session, if there is one."""
        options = replace(asked.options, client_id=turns_of(asked.options.client_id))
        if session is not None:
            content = prompts[0] or None
            turn = session.stream(
                asked.config,
                content=content,
                options=options,
                request_id=answer_id,
                turn_id=asked.turn_id,
            )
            return [turn]
        return [
            self.served.engine.stream(
                cast(Prompt, prompt),  # messages were rendered
                asked.config,
                options=options,
                request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{index}",
            )
            for index, prompt in enumerate(prompts)
        ]

    async def _answer(
        self,
        request: Request,
        prompts: Sequence[Prompt | Messages],
        asked: Asked,
        answer_id: str,
        writer: AnswerWriter,
        session: AsyncSession | None = None,
    ) -> Response:
        self.served.check_size(len(prompts) * asked.config.n)
        streams = self._streams(request, prompts, asked, answer_id, session)
        operation = "chat" if isinstance(writer, ChatWriter) else "text_completion"
        traced = (self.served.watched(one, operation, asked.config) for one in streams)
        outputs = merge([self._metrics.watch(one, "http", asked.config.n) for one in traced])
        headers = {}
        if session is None:
            headers["x-swiftjax-prefix-hash"] = prefix_hash(cast(Prompt, prompts[0]))
        first = await anext(outputs)
        if asked.stream:
            return EventStream(
                first,
                outputs,
                writer,
                self._describe_error,
                include_usage=asked.include_usage,
                headers=headers,
            )
        writer.add(*first)
        async for indexed in outputs:
            writer.add(*indexed)
        return JsonReply(writer.whole(), headers=headers)

    def _describe_error(self, error: Exception) -> ErrorReply:
        self._metrics.count_error(error, "http")
        return describe(error)

    def _describe(self) -> dict[str, Any]:
        model = self.served.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "swiftjax",
            "max_model_len": model.max_model_len,
        }
