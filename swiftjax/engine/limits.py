"""What one engine can take: the limits that a request or a session is checked against at the door.

Plain values, the same in the engine and in a front end that is another process; checks raise
InvalidRequestError. Made by `build.py`.
"""

from dataclasses import replace
from typing import NamedTuple

from swiftjax.engine.generation import GenerationConfig
from swiftjax.engine.request import check_streams
from swiftjax.engine.streaming import MAX_STREAM_LEN, Streaming
from swiftjax.errors import InvalidRequestError


class EngineLimits(NamedTuple):
    """What a request is checked against at the door."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    streams: bool = False  # whether requests may ask for streaming
    has_sessions: bool = True
    windows: tuple[int, ...] = ()  # of layers that have one of their own
    default_streaming: Streaming | None = None  # of requests and sessions that name none

    def completed(self, config: GenerationConfig) -> GenerationConfig:
        """What a request asks, with the engine's own streaming where that can be.

        Several choices can't stream; they end with the context.
        """
        if config.streaming is not None or config.n > 1:
            return config
        return replace(config, streaming=self.default_streaming)

    def check_session(self, streaming: Streaming | None) -> None:
        """Raise InvalidRequestError where there are no sessions, or none with streaming."""
        if not self.has_sessions:
            raise InvalidRequestError(
                "this engine records a trace, and a replay does not know what sessions keep: "
                "start it without a trace to open sessions"
            )
        check_streams(streaming, self.streams)
        self.check_windows(streaming)

    def check_windows(self, streaming: Streaming | None) -> None:
        """Raise InvalidRequestError for a cache that ends amid what a layer sees of it."""
        for window in self.windows if streaming else ():
            assert streaming is not None
            if streaming.window < window < streaming.shared_len():
                raise InvalidRequestError(
                    f"sink {streaming.sink} and window {streaming.window} of streaming do not go "
                    f"with the model's own window of {window} tokens, which would see some sinks "
                    f"only: take a window of at most {window - streaming.sink}, or of {window} and "
                    "more"
                )

    def longest(self, streaming: Streaming | None) -> int:
        """Most tokens of prompt and answer together."""
        return MAX_STREAM_LEN if streaming and self.streams else self.max_model_len
