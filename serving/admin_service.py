"""The methods of swiftjax.v1.AdminService; `interceptor.py` decides who may call them."""

import asyncio
from collections.abc import Awaitable, Callable

from swiftjax.engine.checks import check_count
from swiftjax.engine.request_options import MAX_TIME_LIMIT
from swiftjax.errors import InvalidRequestError, NotReadyError, UnsupportedError
from swiftjax.serving.gate import Gate
from swiftjax.serving.interceptor import Context
from swiftjax.serving.options import read_duration
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.served import Served

MAX_ABORTS = 10_000
RELOAD_DRAIN_SECONDS = 30.0


# (what is served, path, seconds for running calls) -> what is served then
Reload = Callable[[Served, str, float], Awaitable[Served]]


class AdminService(pb_grpc.AdminServiceServicer):
    """They answer while the server drains, too; `served` is set when the model is loaded."""

    served: Served | None = None
    reload: Reload | None = None

    def __init__(self, gate: Gate, drain: Callable[[], Awaitable[object]]) -> None:
        """`drain` is to refuse new calls and return."""
        self._gate = gate
        self._drain = drain

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End requests between two steps."""
        check_count("request ids", len(request.request_ids), MAX_ABORTS)
        for request_id in request.request_ids:
            self._loaded().engine.abort(request_id)
        return pb.AbortResponse()

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Give the counts of the engine's last step."""
        stats = self._loaded().engine.stats()
        return pb.GetLoadResponse(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_pages=stats.num_pages,
            num_free_pages=stats.num_free_pages,
            num_cached_pages=stats.num_idle_pages,
            page_size=stats.page_size,
            num_preemptions=stats.num_preemptions,
            is_draining=not self._gate.is_open,
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Refuse new calls from now on."""
        self._loaded()  # the end of the loading would open the gate again
        await self._drain()
        return pb.DrainResponse()

    async def ReloadModel(
        self, request: pb.ReloadModelRequest, context: Context
    ) -> pb.ReloadModelResponse:
        """Change the weights; goes on to its end though the caller may leave."""
        seconds = RELOAD_DRAIN_SECONDS
        if request.HasField("drain_timeout"):
            seconds = read_duration("drain_timeout", request.drain_timeout)
        if not 0 <= seconds <= MAX_TIME_LIMIT:
            raise InvalidRequestError(
                f"drain_timeout is {seconds:g} s; it must lie in [0, {MAX_TIME_LIMIT:g}]"
            )
        served = self._loaded()
        if self.reload is None:
            raise UnsupportedError("the weights of this server cannot be changed: start another")
        changing = asyncio.ensure_future(self.reload(served, request.path, seconds))
        return pb.ReloadModelResponse(model=(await asyncio.shield(changing)).model)

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        """Forget cached prefixes."""
        self._loaded().engine.forget_prefixes()
        return pb.FlushPrefixCacheResponse()

    def _loaded(self) -> Served:
        if self.served is None:
            raise NotReadyError("the model is loading; try again when the server is ready")
        return self.served
