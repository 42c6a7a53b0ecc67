"""Messages as bytes between two processes: msgpack behind four bytes that say how long it is.

`Outbox` sends without ever holding up its caller. Used by both ends of `process_link.py`.
"""

import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import msgspec

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()


def to_frame(message: msgspec.Struct) -> bytes:
    """Write one message as it is sent."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return bytes(frame)


class FrameReader:
    """Puts messages together again from what a stream socket brings."""

    def __init__(self, kinds: Any) -> None:
        """`kinds` is the union of the messages that may come; raises for anything else."""
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Give the messages that are complete now."""
        self._buffer += data
        messages, start = [], 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH.size:
                begin = start + _LENGTH.size
                end = begin + _LENGTH.unpack_from(view, start)[0]
                if end > len(view):
                    break
                messages.append(self._decoder.decode(view[begin:end]))
                start = end
        del self._buffer[:start]
        return messages


class Outbox:
    """Sends frames in order: at once as far as the socket takes them, the rest from a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._waiting: list[bytes] = []  # the thread is at work while there is any
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._flush, name="swiftjax-outbox", daemon=True)
        self._thread.start()

    def send(self, message: msgspec.Struct) -> None:
        """Send or keep for sending; what cannot be sent any more is dropped."""
        data = to_frame(message)
        with self._changed:
            if not self._waiting:
                sent = self._try(data)
                if sent == len(data):
                    return
                data = data[sent:]
                self._changed.notify_all()
            self._waiting.append(data)

    def drain(self, seconds: float) -> None:
        """Wait until everything was sent, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)

    def _try(self, data: bytes) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the other end is gone, which whoever reads from it is told
            return len(data)

    def _flush(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                data = b"".join(self._waiting)
                count = len(self._waiting)
            with suppress(OSError):
                self._socket.sendall(data)
            with self._changed:
                del self._waiting[:count]
                self._changed.notify_all()
