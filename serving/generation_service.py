"""The methods of swiftjax.v1.GenerationService over an AsyncEngine.

Translates only: messages to values (`messages.py`); `interceptor.py` turns errors into statuses.
When a client cancels or its deadline passes, grpc.aio cancels the handler; that closes the engine's
stream, which aborts the request.
"""

from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import cast

from swiftjax.engine.checks import check_count
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.text_threads import CHARS_PER_ID, count_chars, in_thread, tokenise
from swiftjax.errors import InvalidRequestError
from swiftjax.serving import messages
from swiftjax.serving.caller import current_caller, turns_of
from swiftjax.serving.interceptor import Context
from swiftjax.serving.merging import MAX_ANSWERS, Outputs, merge
from swiftjax.serving.metrics import Metrics
from swiftjax.serving.options import read_generation_config, read_request_options
from swiftjax.serving.pacing import until_all_are_made
from swiftjax.serving.patience import Patience, patience
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.served import Served
from swiftjax.serving.session_desk import find_session


class GenerationService(pb_grpc.GenerationServiceServicer):
    """Generation over gRPC. `served` is set before the gate lets the first call in."""

    served: Served

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Write what the engine streams; everything since the last write is one message."""
        stream = await self._stream(request, context)
        with_logprobs = request.output.HasField("logprobs")
        async with self._patience() as patient, aclosing(stream):
            async for output in stream:
                response = messages.write_output(output, with_logprobs=with_logprobs)
                await until_all_are_made()
                patient.since = monotonic()
                await context.write(response)
                patient.since = None

    async def GenerateBatch(self, request: pb.GenerateBatchRequest, context: Context) -> None:
        """Write what all the streams bring, as it comes."""
        requests = request.requests
        if not requests:
            raise InvalidRequestError("no requests: give at least one")
        # A request without an n has one answer, and n is checked with the others.
        num_answers = sum(max(1, r.sampling.n) for r in requests)
        check_count("answers", num_answers, MAX_ANSWERS)
        self.served.check_size(num_answers)
        outputs = merge([await self._stream(one, context) for one in requests])
        async with self._patience() as patient, aclosing(outputs):
            async for index, output in outputs:
                with_logprobs = requests[index].output.HasField("logprobs")
                response = messages.write_output(output, with_logprobs=with_logprobs)
                await until_all_are_made()
                whole = pb.GenerateBatchResponse(request_index=index, response=response)
                patient.since = monotonic()
                await context.write(whole)
                patient.since = None

    def _patience(self) -> AbstractAsyncContextManager[Patience]:
        return patience(self.served.engine.reader_limits.max_paused_seconds)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turn text or a chat into token ids."""
        engine, model = self.served[:2]
        messages.check_model(request.model, model.name)
        kind = request.WhichOneof("prompt")
        if kind == "chat":
            ids = await self._render(request.chat, engine.limits.max_model_len)
        elif kind == "text":
            add = request.add_special_tokens or not request.HasField("add_special_tokens")
            ids = await tokenise(engine.tokenizer, request.text, add)
        else:
            raise InvalidRequestError("no prompt: set text or chat")
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """Turn token ids into text."""
        engine, model = self.served[:2]
        messages.check_model(request.model, model.name)
        skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
        vocab_size = engine.limits.vocab_size

        def decode() -> str:
            ids = messages.read_vocabulary_ids(request.token_ids, vocab_size)
            return engine.tokenizer.decode(ids, skip)

        num_chars = len(request.token_ids) * CHARS_PER_ID
        return pb.DetokenizeResponse(text=await in_thread(num_chars, decode))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describe the model."""
        return self.served.model

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Describe the model, in a list."""
        return pb.ListModelsResponse(models=[self.served.model])

    async def _stream(self, request: pb.GenerateRequest, context: Context) -> Outputs:
        """Read a request; what is given back does nothing before it is read."""
        arrival = monotonic()
        engine, model = self.served[:2]
        messages.check_model(request.model, model.name)
        config = read_generation_config(request)
        options = read_request_options(request)
        options = replace(options, client_id=turns_of(options.client_id))
        timeout = context.time_remaining()
        whole = {
            "request_id": request.request_id or None,
            "timeout": None if timeout is None else float(timeout),  # an int once it has passed
        }
        if request.session:
            session = find_session(self.served, request.session, current_caller().name)
            content = messages.read_content(request, session.text.longest)
            stream = session.stream(
                config, content=content, options=options, turn_id=request.turn_id, **whole
            )
            return self._watch(stream, request, config)
        if request.turn_id:
            raise InvalidRequestError("turn_id belongs to the turns of a session: leave it out")
        prompt = await self._read_prompt(request, engine.limits.longest(config.streaming))
        options = options.with_time_left(monotonic() - arrival)
        stream = engine.stream(prompt, config, options=options, **whole)
        return self._watch(stream, request, config)

    def _watch(
        self, stream: Outputs, request: pb.GenerateRequest, config: GenerationConfig
    ) -> Outputs:
        operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
        return self._metrics.watch(self.served.watched(stream, operation, config), "grpc", config.n)

    async def _read_prompt(
        self, request: pb.GenerateRequest, max_model_len: int
    ) -> str | tuple[int, ...] | list[int]:
        if request.WhichOneof("prompt") == "chat":
            return await self._render(request.chat, max_model_len)
        prompt = messages.read_content(request, max_model_len)
        if prompt is None:
            raise InvalidRequestError("no prompt: set text, chat or token_ids")
        return cast(str | tuple[int, ...], prompt)  # messages were rendered further up

    async def _render(self, chat: pb.Chat, max_model_len: int) -> list[int]:
        engine = self.served.engine
        turns = messages.read_chat(chat, max_model_len)
        render = partial(engine.tokenizer.apply_chat_template, turns)
        ids = await in_thread(count_chars(turns), render)
        return cast(list[int], ids)  # text only with tokenize=False
