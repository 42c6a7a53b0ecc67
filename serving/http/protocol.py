"""HTTP/1.1 as uvicorn speaks it with httptools, and a limit that httptools has not.

Its parser, which is in C and writes chunks at a quarter of h11's price, would collect a head, a
trailer or a chunk's extension for as long as one comes. Used by `http_server.py`.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 16 * 2**10


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_bytes = 0  # that came since the last that were body, or the end of something

    def data_received(self, data: bytes) -> None:
        """Read on, unless what came is too much to be a head."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"at most {MAX_HEADER_BYTES} bytes of headers are taken")

    def on_headers_complete(self) -> None:
        """The head is whole; one that came in one piece is measured by the application."""
        self._num_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._num_bytes = 0
        super().on_message_complete()
