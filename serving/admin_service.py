"""The methods of swiftjax.v1.AdminService; `interceptor.py` decides who may call them."""

from collections.abc import Awaitable, Callable

from swiftjax.engine.checks import check_count
from swiftjax.errors import NotReadyError
from swiftjax.serving.gate import Gate
from swiftjax.serving.interceptor import Context
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.served import Served

MAX_ABORTS = 10_000


class AdminService(pb_grpc.AdminServiceServicer):
    """They answer while the server drains, too; `served` is set when the model is loaded."""

    served: Served | None = None

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
