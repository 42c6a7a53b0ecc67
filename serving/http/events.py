"""Answers as server-sent events: the bytes of OpenAI's chunks.

Most events of a stream differ in their text alone. What surrounds it is written once, because
writing a whole chunk takes several times as long as writing its text. Used by `streams.py`.
"""

import msgspec

from swiftjax.engine.request import StreamOutput
from swiftjax.serving.http.writing import AnswerWriter

END = b"data: [DONE]\n\n"
_MARK = "\0"  # stands for the text; a name of a model cannot have it
_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """Write one event."""
    return b"data: " + _encode(value) + b"\n\n"


class EventWriter:
    """Writes the events of one answer; its writer says what is in them."""

    def __init__(self, writer: AnswerWriter) -> None:
        self._writer = writer
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice: before and after its text

    def write(self, prompt_index: int, output: StreamOutput) -> bytes:
        """Write what is new of one choice, which may be nothing."""
        index = self._writer.count(prompt_index, output)
        if not self._writer.is_plain(index, output):
            return b"".join(map(event, self._writer.chunks(index, output)))
        frame = self._frames.get(index)
        if frame is None:
            frame = self._frames[index] = self._make_frame(index, output)
        return frame[0] + _encode(output.text) + frame[1]

    def usage(self) -> bytes:
        """Write the last event of a stream that was asked for usage."""
        return event(self._writer.usage_chunk())

    def _make_frame(self, index: int, output: StreamOutput) -> tuple[bytes, bytes]:
        marked = msgspec.structs.replace(output, text=_MARK)
        (chunk,) = self._writer.chunks(index, marked)
        before, _, after = event(chunk).partition(_encode(_MARK))
        return before, after
