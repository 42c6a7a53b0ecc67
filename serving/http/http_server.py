"""The HTTP listener: uvicorn on the event loop that gRPC runs on, with our socket and our limits.

Started and stopped by `server.py`. uvicorn's own signal handling and logs stay out: what goes wrong
in a request is logged by `incidents.py`.
"""

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import uvicorn

from swiftjax.errors import SwiftJaxError
from swiftjax.serving.gate import Gate
from swiftjax.serving.http.app import make_app
from swiftjax.serving.http.protocol import HttpProtocol
from swiftjax.serving.http.routes import Routes
from swiftjax.serving.keys import KeyRing
from swiftjax.serving.metrics import Metrics
from swiftjax.serving.served import Served

BACKLOG = 1024
# A client that takes nothing for so long has gone, whatever its machine says.
UNREAD_SECONDS = 60
# From a TCP connection to a TLS one, which is the first that is counted.
HANDSHAKE_SECONDS = 10.0
# What is left to do for requests that were cut off: close their connections.
STOP_GRACE_SECONDS = 1


class HttpServer:
    """One listener. Must be made inside the event loop that runs it."""

    def __init__(
        self,
        host: str,
        port: int,
        gate: Gate,
        keys: KeyRing,
        metrics: Metrics,
        *,
        allowed_origins: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
        max_connections: int | None = None,
    ) -> None:
        """Bind the port (0 takes a free one); raises SwiftJaxError when it cannot be had."""
        self._routes = Routes(gate, metrics)
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        bracketed = f"[{host}]" if ":" in host else host
        self.address = f"{'https' if tls else 'http'}://{bracketed}:{self.port}"
        config = uvicorn.Config(
            make_app(self._routes.router(), keys, metrics, allowed_origins),
            http=cast(type[HttpProtocol], partial(HttpProtocol, max_connections)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_GRACE_SECONDS,
        )
        config.load()
        config.ssl = tls
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections; until the gate opens every request that needs the model gets 503."""
        await self._listen()
        self._ticking = asyncio.create_task(self._server.main_loop())

    async def _listen(self) -> None:
        """Do as uvicorn's own startup, which would let a handshake take a minute."""
        config = self._server.config
        new_protocol = partial(
            config.http_protocol_class,
            config=config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )
        server = await asyncio.get_running_loop().create_server(
            cast(Callable[[], asyncio.Protocol], new_protocol),
            sock=self._socket,
            ssl=config.ssl,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if config.ssl else None,
            backlog=BACKLOG,
        )
        self._server.servers = [server]
        self._server.started = True

    def open(self, served: Served) -> None:
        """Answer with this engine, which must be warm; the gate is opened by others."""
        self._routes.served = served

    async def stop(self) -> None:
        """Close the port and cut off what still runs."""
        if self._ticking is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._ticking
        await self._server.shutdown(sockets=[self._socket])


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        # Without the protocol asyncio does not see that this is TCP, and leaves Nagle's delay on.
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":  # and every connection has it from here
                unread = UNREAD_SECONDS * 1000
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread)
            bound.bind(address)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError:
        raise SwiftJaxError(
            f"cannot listen on {host}:{port}: the port is taken or the address is not one of this "
            "machine; choose another port or host"
        ) from None
    bound.setblocking(False)
    return bound
