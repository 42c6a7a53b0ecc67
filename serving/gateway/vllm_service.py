"""The methods of VllmEngine over an AsyncEngine. Translates only; see `vllm_messages.py`.

The gateway ends a request by Abort and leaves its stream open, so Abort must be there.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from typing import NoReturn

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from swiftjax import __version__
from swiftjax.engine.checks import check_count
from swiftjax.engine.request import RequestOptions
from swiftjax.errors import NotReadyError, UnsupportedError
from swiftjax.serving.admin_service import MAX_ABORTS
from swiftjax.serving.caller import current_caller, turns_of
from swiftjax.serving.gate import Gate
from swiftjax.serving.gateway.tokenizer_bundle import make_bundle
from swiftjax.serving.gateway.vllm_messages import AnswerWriter, read_config, read_prompt
from swiftjax.serving.interceptor import Context
from swiftjax.serving.metrics import Metrics
from swiftjax.serving.pacing import until_all_are_made
from swiftjax.serving.patience import patience
from swiftjax.serving.served import Served


class VllmService(pb_grpc.VllmEngineServicer):
    """`served` is set when the model is loaded; what is about the server answers before, too."""

    served: Served | None = None

    def __init__(self, gate: Gate, metrics: Metrics) -> None:
        self._gate = gate
        self._metrics = metrics
        self._started = time.time()
        self._bundle: asyncio.Future[list[bytes]] | None = None
        self._callers: dict[str, str] = {}  # of the requests that run, by their ids

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream tokens, or send them all at the end of a choice."""
        served = self._loaded()
        engine = served.engine
        prompt = read_prompt(request, engine.limits.max_model_len)
        config = read_config(request.sampling_params)
        writer = AnswerWriter(prompt, config, stream=request.stream)
        timeout = context.time_remaining()
        stream = engine.stream(
            prompt,
            config,
            options=RequestOptions(client_id=turns_of("")),
            request_id=request.request_id or None,
            timeout=None if timeout is None else float(timeout),
        )
        stream = served.watched(stream, "text_completion", config)
        with self._remembered(request.request_id):
            outputs = self._metrics.watch(stream, "vllm", config.n)
            paused = engine.reader_limits.max_paused_seconds
            async with patience(paused) as patient, aclosing(outputs):
                async for output in outputs:
                    responses = writer.write(output)
                    await until_all_are_made()
                    patient.since = time.monotonic()
                    for response in responses:
                        await context.write(response)
                    patient.since = None

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End requests of this caller between two steps; all other ids are ignored."""
        check_count("request ids", len(request.request_ids), MAX_ABORTS)
        caller = current_caller()
        for request_id in request.request_ids:
            if self._callers.get(request_id) == caller.name or caller.is_admin:
                self._loaded().engine.abort(request_id)
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Say whether requests are taken."""
        is_healthy = self._gate.is_open and self.served is not None and self.served.engine.is_alive
        return pb.HealthCheckResponse(
            healthy=is_healthy, message="ready" if is_healthy else "not ready"
        )

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Describe the model; its place on this machine is nobody's business."""
        model = self._loaded().model
        return pb.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=model.name,
            tokenizer_path=model.name,
            is_generation=True,
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_model_len - 1,
            vocab_size=model.vocab_size,
            model_type=model.family,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Describe the server."""
        served = self._loaded()
        stats = served.engine.stats()
        now = time.time()
        return pb.GetServerInfoResponse(
            active_requests=stats.num_running + stats.num_waiting,
            is_paused=not self._gate.is_open,
            last_receive_timestamp=now,
            uptime_seconds=now - self._started,
            server_type="vllm-grpc",  # the name of this contract, by which the gateway knows it
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=stats.page_size,
            model_dtype=served.model.dtype,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Say how busy the engine is."""
        served = self._loaded()
        stats = served.engine.stats()
        used = stats.num_pages - stats.num_free_pages
        load = pb.SchedulerLoad(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=used * stats.page_size,
            max_total_num_tokens=stats.num_pages * stats.page_size,
            token_usage=used / stats.num_pages,
            gen_throughput=served.watch.tokens_per_second() if served.watch else 0.0,
            utilization=used / stats.num_pages,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=__version__,
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        """Send the tokenizer's files, zipped once."""
        if self._bundle is None:
            served = self._loaded()
            making = asyncio.to_thread(make_bundle, served.engine.tokenizer, served.model)
            self._bundle = asyncio.ensure_future(making)
            self._bundle.add_done_callback(self._forget_failure)
        for part in await asyncio.shield(self._bundle):
            await context.write(common_pb2.GetTokenizerChunk.FromString(part))

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Forget cached prefixes."""
        self._loaded().engine.forget_prefixes()
        return common_pb2.FlushCacheResponse(success=True)

    async def Embed(self, request: object, context: Context) -> NoReturn:
        """Not built: this server generates."""
        raise UnsupportedError("embeddings are not made here")

    async def StartProfile(self, request: object, context: Context) -> NoReturn:
        """Not built."""
        raise UnsupportedError("profiles are not taken over gRPC")

    async def StopProfile(self, request: object, context: Context) -> NoReturn:
        """Not built."""
        raise UnsupportedError("profiles are not taken over gRPC")

    async def SubscribeKvEvents(self, request: object, context: Context) -> NoReturn:
        """Not built; the gateway asks GetLoads instead."""
        raise UnsupportedError("cache events are not told")

    @contextmanager
    def _remembered(self, request_id: str) -> Iterator[None]:
        """Know whose request it is for as long as it runs; the first to use an id has it.

        That may be a request that did not come through here, which nobody aborts through here.
        """
        is_new = request_id not in self._callers and not self._loaded().engine.has(request_id)
        if is_new:
            self._callers[request_id] = current_caller().name
        try:
            yield
        finally:
            if is_new:
                del self._callers[request_id]

    def _forget_failure(self, bundle: asyncio.Future[list[bytes]]) -> None:
        """Let the next caller try again."""
        if bundle.cancelled() or bundle.exception() is not None:
            self._bundle = None

    def _loaded(self) -> Served:
        if self.served is None:
            raise NotReadyError("the model is loading; try again when the server is ready")
        return self.served
