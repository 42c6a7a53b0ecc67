"""The text of one session: what was appended and answered so far, and whose turn it is.

A turn is one request for the whole text; while it runs nothing else is done to the session. Knows
tokens, no pages and no engine. Used by the blocking and the asynchronous sessions alike.
"""

import secrets
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from swiftjax.engine.checks import check_in_vocabulary, check_int, check_label
from swiftjax.engine.generation import GenerationConfig
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.request import Request, StepOutput
from swiftjax.engine.request_options import NO_OPTIONS, RequestOptions
from swiftjax.engine.session_file import SessionState
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError

UNDER_WAY = "a turn of the session is under way: read it to its end, or close it, first"


def new_session_id() -> str:
    """An id that nobody can guess."""
    return f"session-{secrets.token_hex(16)}"


class SessionText:
    """One conversation. `seed` is used by every turn that brings none of its own."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        session_id: str = "",
        streaming: Streaming | None = None,
        seed: int | None = None,
        options: RequestOptions = NO_OPTIONS,
        token_ids: SequenceOf[int] = (),
    ) -> None:
        """Raises InvalidRequestError for what the engine has not, as a request would."""
        limits.check_session(streaming)
        if seed is not None:
            check_int("seed", seed, 0, 2**64 - 1)
        check_label("session id", session_id)
        self.session_id = session_id or new_session_id()
        self.streaming = streaming
        self.seed = secrets.randbits(64) if seed is None else seed
        self.options = options
        self.token_ids: list[int] = []
        self.is_busy = False
        self._limits = limits
        self.append(token_ids)

    @classmethod
    def of(cls, limits: EngineLimits, session_id: str, state: SessionState) -> "SessionText":
        """Go on with what was saved."""
        return cls(limits, session_id=session_id, **state._asdict())

    def state(self) -> SessionState:
        """What there is to save."""
        self.check_idle()
        return SessionState(tuple(self.token_ids), self.seed, self.streaming, self.options)

    def append(self, token_ids: SequenceOf[int]) -> None:
        """Add to the text; raises InvalidRequestError for ids that are none or too many."""
        self.check_idle()
        check_in_vocabulary("the text", token_ids, self._limits.vocab_size)
        length, longest = len(self.token_ids) + len(token_ids), self.longest
        if length >= longest:
            raise InvalidRequestError(
                f"the session would have {length} tokens; {longest} must hold its text and at "
                "least one new token: append less, or open a session with streaming"
            )
        self.token_ids += token_ids

    @property
    def longest(self) -> int:
        """Most tokens of text."""
        return self._limits.longest(self.streaming)

    def fork(self) -> "SessionText":
        """Another conversation that has begun like this one; its seed is the same."""
        self.check_idle()
        return SessionText(
            self._limits,
            streaming=self.streaming,
            seed=self.seed,
            options=self.options,
            token_ids=self.token_ids,
        )

    def configure(self, config: GenerationConfig) -> GenerationConfig:
        """What a turn of this session asks; raises InvalidRequestError for what it can't have."""
        self.check_idle()
        if not self.token_ids:
            raise InvalidRequestError("the session is empty: append something first")
        if config.streaming not in (None, self.streaming):
            raise InvalidRequestError(
                "streaming belongs to a session from its start: leave it out of the turn"
            )
        unfit = {
            "n": config.n > 1,
            "echo": config.echo,
            "prompt_logprobs": config.prompt_logprobs is not None,
        }
        if named := [name for name, is_set in unfit.items() if is_set]:
            raise InvalidRequestError(f"a session does not go with {' and '.join(named)}")
        seed = self.seed if config.seed is None else config.seed
        return replace(config, streaming=self.streaming, seed=seed)

    def check_idle(self) -> None:
        """Raise InvalidRequestError while a turn is under way."""
        if self.is_busy:
            raise InvalidRequestError(UNDER_WAY)


class Turn:
    """One answer on its way into the text of its session.

    It is over when the engine has said its last word and its reader has read his.
    """

    def __init__(
        self, text: SessionText, request: Request, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.request = replace(request, session=text.session_id)
        self.is_read = False
        self._text = text
        self._on_end = on_end
        self._limit: int | None = None
        self._start = len(text.token_ids)
        self._engine_is_done = False
        text.is_busy = True

    def record(self, output: StepOutput) -> None:
        """Take what the engine says, to its last word."""
        self._text.token_ids += output.token_ids
        if output.finish_reason is not None:
            self.fall_silent()

    def fall_silent(self) -> None:
        """The engine will say no more."""
        self._engine_is_done = True
        self._end()

    def read(self, num_tokens: int | None = None) -> None:
        """The reader is done: with the whole answer of so many tokens, or with less (None).

        Behind a stop string the engine may have gone on for a while; what it made there is no part
        of the text. An answer that was not read to its end is, as far as it was made.
        """
        self.is_read = True
        if num_tokens is not None:
            self._limit = self._start + num_tokens
        self._end()

    def _end(self) -> None:
        if not (self.is_read and self._engine_is_done):
            return
        if self._limit is not None:
            del self._text.token_ids[self._limit :]
        self._text.is_busy = False
        self._on_end()
