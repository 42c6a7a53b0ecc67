"""Endless text in bounded memory: attention sinks and a window, and which pages they still need.

A streaming sequence attends its first `sink` tokens and its last `window`; everything between is
forgotten, and pages that hold nothing else are given back. Knows positions and page counts only;
the scheduler owns pages, the model the rotation. docs/streaming.md explains the rule.
"""

from dataclasses import dataclass, replace

from swiftjax.engine.checks import check_int

MAX_SINK = 1024
MAX_WINDOW = 2**20
MAX_BUFFER = 2**16
MAX_STREAM_LEN = 2**31 - 2**20  # positions are int32, and some are computed past the last token
# Tokens by which the next turn of a session may go back: what was computed after a stop string.
SESSION_MARGIN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """Attend the first `sink` tokens and the last `window`, the newest included.

    At most about `buffer` tokens wait on the host for a slow reader, whose request is paused beyond
    that (`engine/mailbox.py`). Raises InvalidRequestError for a value outside its range.
    """

    sink: int = 4
    window: int = 2000
    buffer: int = 2048

    def __post_init__(self) -> None:
        check_int("sink of streaming", self.sink, 0, MAX_SINK)
        check_int("window of streaming", self.window, 1, MAX_WINDOW)
        check_int("buffer of streaming", self.buffer, 1, MAX_BUFFER)

    def sink_pages(self, page_size: int) -> int:
        """Pages that hold a sink: the first ones."""
        return -(-self.sink // page_size)

    def least_pages(self, page_size: int) -> int:
        """What the sinks and any window take, however it lies in its pages, with a new token."""
        return self.sink_pages(page_size) + -(-(self.window - 1) // page_size) + 1

    def most_pages(self, page_size: int) -> int:
        """The same with room for a chunk of a prompt that is about as long as the window."""
        return self.least_pages(page_size) + -(-self.window // page_size)

    def with_margin(self) -> "Streaming":
        """A window so much longer that a session can go back a few tokens."""
        return replace(self, window=min(self.window + SESSION_MARGIN, MAX_WINDOW))

    def shared_len(self) -> int:
        """Tokens whose keys and values are those of a sequence that forgets nothing."""
        return self.sink + self.window

    def expired_pages(self, position: int, page_size: int) -> int:
        """Pages after those of the sinks that no token from `position` on attends."""
        window_start = position - self.window + 1
        return max(0, window_start // page_size - self.sink_pages(page_size))
