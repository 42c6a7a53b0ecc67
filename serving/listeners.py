"""The ports of one server, which open, drain and close together behind one gate.

Knows which transports there are; what they serve is handed to `open`. Called by `server.py`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from swiftjax.serving.gate import Gate
from swiftjax.serving.gauges import Gauges
from swiftjax.serving.grpc_server import GrpcServer
from swiftjax.serving.http.http_server import HttpServer
from swiftjax.serving.keys import KeyRing
from swiftjax.serving.metrics import Metrics
from swiftjax.serving.reloading import Reloading
from swiftjax.serving.served import Served
from swiftjax.serving.tls import ServerTls

LAG_SECONDS = 0.5  # between two looks at how late the event loop is


@dataclass(frozen=True, kw_only=True, slots=True)
class Listen:
    """Where to listen and whom to let in. Port 0 takes a free one; no HTTP without `http_port`.

    `max_connections` are those of each port: more are closed as they come.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 0
    http_port: int | None = None
    keys: KeyRing = field(default_factory=KeyRing)
    allowed_origins: Sequence[str] = ()
    tls: ServerTls | None = None
    max_connections: int | None = None


class Listeners:
    """All transports of one server. Must be made inside the event loop that runs them."""

    def __init__(self, listen: Listen) -> None:
        """Bind every port; raises SwiftJaxError when one cannot be had."""
        self._gate = Gate()
        self._metrics = Metrics()
        self._measuring: asyncio.Task[None] | None = None
        shared = (self._gate, listen.keys, self._metrics)
        tls = listen.tls
        most = listen.max_connections
        self.grpc = GrpcServer(listen.host, listen.grpc_port, *shared, tls, max_connections=most)
        self._reloading = Reloading(self._gate, partial(self.grpc.drain, for_good=False), self.open)
        self.grpc.offer_reload(self._reloading.run)
        self.http: HttpServer | None = None
        if listen.http_port is not None:
            self.http = HttpServer(
                listen.host,
                listen.http_port,
                *shared,
                allowed_origins=listen.allowed_origins,
                tls=None if tls is None else tls.context,
                max_connections=most,
            )

    async def start(self) -> None:
        """Accept connections; until `open` only health is told."""
        await self.grpc.start()
        if self.http is not None:
            await self.http.start()
        self._measuring = asyncio.create_task(self._measure_lag())

    async def open(self, served: Served) -> list[str]:
        """Answer calls with this engine, which must be warm; gives a line for each port."""
        name = served.model.name
        watched = () if served.watch is None else (served.watch.registry,)
        self._metrics.attach(name, Gauges(served, self._gate), *watched)
        served.engine.watch_grammars(self._metrics.grammar_compile.observe)
        lines = [f"serving {name} on {self.grpc.address} (gRPC)"]
        if self.http is not None:
            self.http.open(served)
            lines.append(f"serving {name} on {self.http.address} (OpenAI HTTP)")
        await self.grpc.open(served)  # and with it the gate
        return lines

    @property
    def is_draining(self) -> bool:
        """Whether an operator has asked for no new calls, for good."""
        return self._gate.is_shut

    def count_restart(self) -> None:
        """Count that an engine is started in place of one that died."""
        self._metrics.engine_restarts.inc()

    async def drain(self, reason: str, seconds: float, *, for_good: bool = True) -> bool:
        """Refuse new calls and wait for those that run; false when some still do after that.

        Unless it is for good, `open` ends it.
        """
        return await self.grpc.drain(reason, seconds, for_good=for_good)

    async def suspend(self, is_silent: bool) -> None:
        """Refuse new calls while the engine does not answer; those that run wait for it."""
        await self.grpc.suspend(is_silent)

    async def stop(self) -> None:
        """Close the ports and cut off what still runs."""
        if self._measuring is not None:
            self._measuring.cancel()
        if self.http is not None:
            await self.http.stop()
        await self.grpc.stop()

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self._metrics.loop_lag.observe(max(0.0, loop.time() - due))
