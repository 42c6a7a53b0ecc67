"""HTTP/1.1 as uvicorn speaks it with httptools, and limits that they have not.

Its parser, which is in C and writes chunks at a quarter of h11's price, would collect a head, a
trailer or a chunk's extension for as long as one comes. uvicorn waits for ever for the first head
of a connection and for the rest of a body that was answered before it came, takes in all requests
that a client sends ahead, and tells only the last of them that it has left. Used by
`http_server.py`.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 16 * 2**10
# From the first byte of a head, or from the start of a connection, to its end; and for what is left
# of a body whose answer is complete.
HEAD_SECONDS = 20.0
MAX_AHEAD = 32  # requests on one connection behind the one that is answered


class TooFarAheadError(Exception):
    """Lets the parser stop in the middle of what came."""


class HttpProtocol(HttpToolsProtocol):
    """One connection, closed at once if so many others are open."""

    def __init__(self, max_connections: int | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._num_bytes = 0  # that came since the last that were body, or the end of something
        self._unanswered: list[RequestResponseCycle] = []  # the one that is answered first
        self._waiting: asyncio.TimerHandle | None = None  # for the rest of a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first request, but not for ever."""
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing will come any more, also for requests before the last."""
        self._stop_waiting()
        super().connection_lost(exc)
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Read on, unless what came is too much to be a head."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_bytes > MAX_HEADER_BYTES:
            self.send_400_response(f"at most {MAX_HEADER_BYTES} bytes of headers are taken")
            return
        # What comes behind an answer has stopped uvicorn's own clock.
        if self._waiting is None and (self._num_bytes or not self._is_answering):
            self._wait()
        if 0 < len(self.pipeline) < MAX_AHEAD and self._num_body_bytes <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # else nobody would notice that the client has left

    def on_headers_complete(self) -> None:
        """The head is whole; one that came in one piece is measured by the application.

        uvicorn answers 400 and closes the connection where this raises.
        """
        if len(self.pipeline) >= MAX_AHEAD:
            raise TooFarAheadError
        self._num_bytes = 0
        self._stop_waiting()
        super().on_headers_complete()
        unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered = [*unanswered, self.cycle]

    def send_400_response(self, msg: str) -> None:
        """Refuse what came; in the middle of an answer nobody could tell the two apart."""
        if any(c.response_started and not c.response_complete for c in self._unanswered):
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_body(self, body: bytes) -> None:
        """A part of the body, for which the application waits, unless it has answered."""
        self._num_bytes = 0
        if self._is_answering:
            self._stop_waiting()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._num_bytes = 0
        super().on_message_complete()
        self._stop_waiting()

    @property
    def _is_answering(self) -> bool:
        """Whether the last request that came is still to be answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _num_body_bytes(self) -> int:
        """Of requests that wait for the answers before theirs."""
        return sum(len(cycle.body) for cycle, _ in self.pipeline)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if self._is_answering:
            self._wait()  # it is still being answered: what comes slowly is the next request
        elif not self.transport.is_closing():
            self.transport.close()
