"""The gRPC listener: generation, sessions, grpc.health.v1 and reflection on one port.

Health says SERVING only between `open` and the end of the engine or the start of a drain. Started
and stopped by `server.py`.
"""

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from swiftjax.errors import SwiftJaxError
from swiftjax.serving.addresses import is_loopback
from swiftjax.serving.admin_service import AdminService, Reload
from swiftjax.serving.gate import Gate
from swiftjax.serving.generation_service import GenerationService
from swiftjax.serving.interceptor import CallInterceptor
from swiftjax.serving.keys import KeyRing
from swiftjax.serving.messages import MAX_MESSAGE_BYTES
from swiftjax.serving.metrics import Metrics
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.served import Served
from swiftjax.serving.session_service import SessionService
from swiftjax.serving.tls import ServerTls

if TYPE_CHECKING:
    from swiftjax.serving.gateway.vllm_service import VllmService

MAX_CALLS_PER_CONNECTION = 4096

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Gateways ping idle connections; by default a server answers a few pings by hanging up.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    # A call that is begun and never sent takes memory too, before any key is asked for.
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    # Calls that came and were not taken up yet. From a thousand on, gRPC would end some at random
    # with CANCELLED, which tells a client nothing; taken up, they are refused in our words.
    ("grpc.server.max_pending_requests", 2 * MAX_CALLS_PER_CONNECTION),
    ("grpc.server.max_pending_requests_hard_limit", 4 * MAX_CALLS_PER_CONNECTION),
    # Makes clients reconnect now and then, so that a balancer before us can spread them anew.
    ("grpc.max_connection_age_ms", 30 * 60_000),
    # Otherwise a second server shares the port and gets half of the calls.
    ("grpc.so_reuseport", 0),
)

GENERATION_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
SESSION_SERVICE = pb.DESCRIPTOR.services_by_name["SessionService"].full_name
ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
SERVICES = ("", GENERATION_SERVICE, SESSION_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME)
GATEWAY_SERVICE = "vllm.grpc.engine.VllmEngine"
DRAINED = "the server was told to take no new calls; use another"

# What is left to do for calls that were cut off: tell their clients.
STOP_GRACE_SECONDS = 0.5


class GrpcServer:
    """One listener. Must be made inside the event loop that runs it."""

    def __init__(
        self,
        host: str,
        port: int,
        gate: Gate | None = None,
        keys: KeyRing | None = None,
        metrics: Metrics | None = None,
        tls: ServerTls | None = None,
        *,
        max_connections: int | None = None,
    ) -> None:
        """Bind the port (0 takes a free one); raises SwiftJaxError when it cannot be had.

        The gate may be shared with other transports, which then open and drain together.
        """
        self._gate = gate or Gate()
        metrics, keys = metrics or Metrics(), keys or KeyRing()
        self._service = GenerationService(metrics)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        interceptor = CallInterceptor(self._gate, keys, metrics)
        options = SERVER_OPTIONS
        if max_connections is not None:
            options += (("grpc.max_allowed_incoming_connections", max_connections),)
        self._server = grpc.aio.server(interceptors=(interceptor,), options=options)
        pb_grpc.add_GenerationServiceServicer_to_server(self._service, self._server)
        self._sessions = SessionService()
        pb_grpc.add_SessionServiceServicer_to_server(self._sessions, self._server)
        self._admin = AdminService(self._gate, lambda: self.drain(DRAINED, 0.0))
        if is_loopback(host) or not keys.is_open:
            pb_grpc.add_AdminServiceServicer_to_server(self._admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*SERVICES[1:]]
        self._gateway = _add_gateway(self._server, self._gate, metrics)
        if self._gateway is not None:
            names.append(GATEWAY_SERVICE)
        if is_loopback(host):
            # Strangers need not be told what there is to call.
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)
        bracketed = f"[{host}]" if ":" in host else host
        self.port = _bind(self._server, f"{bracketed}:{port}", tls)
        self.address = f"{bracketed}:{self.port}"

    async def start(self) -> None:
        """Accept connections; until `open` every call gets UNAVAILABLE."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def open(self, served: Served) -> None:
        """Answer calls with this engine, which must be warm."""
        self._service.served = self._admin.served = self._sessions.served = served
        if self._gateway is not None:
            self._gateway.served = served
        self._gate.open()
        if self._gate.is_open:  # not told to drain meanwhile
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def offer_reload(self, reload: Reload) -> None:
        """Let operators change the weights."""
        self._admin.reload = reload

    async def drain(self, reason: str, seconds: float, *, for_good: bool = True) -> bool:
        """Refuse new calls and wait for those that run; false when some still do after that.

        Unless it is for good, `open` ends it.
        """
        self._gate.close(reason, for_good=for_good)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        return await self._gate.wait_empty(seconds)

    async def suspend(self, is_silent: bool) -> None:
        """Refuse new calls while the engine does not answer; those that run wait for it."""
        self._gate.suspend(is_silent)
        status = health_pb2.HealthCheckResponse
        await self._set_health(status.SERVING if self._gate.is_open else status.NOT_SERVING)

    async def stop(self) -> None:
        """Close the port and cut off what still runs."""
        await self._server.stop(STOP_GRACE_SECONDS)

    async def _set_health(self, status: int) -> None:
        await asyncio.gather(*(self._health.set(name, status) for name in SERVICES))


def _bind(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.grpc_credentials())
    except RuntimeError:
        raise SwiftJaxError(
            f"cannot listen on {address}: the port is taken or the address is not one of this "
            "machine; choose another port or host"
        ) from None


def _add_gateway(server: grpc.aio.Server, gate: Gate, metrics: Metrics) -> "VllmService | None":
    """Add the gateway's service where the package with its messages is installed."""
    if find_spec("smg_grpc_proto") is None:
        return None
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    from swiftjax.serving.gateway.vllm_service import VllmService

    service = VllmService(gate, metrics)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server)
    return service
