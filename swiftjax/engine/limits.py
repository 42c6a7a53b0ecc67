"""What one engine can take: the limits that a request or a session is checked against at the door.

Plain values, the same in the engine and in a front end that is another process; checks raise
InvalidRequestError. Made by `build.py`.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

from swiftjax.engine.checks import check_in_vocabulary, check_label, check_room
from swiftjax.engine.generation import GenerationConfig
from swiftjax.engine.grammar import Grammar
from swiftjax.engine.request import Request
from swiftjax.engine.request_options import NO_OPTIONS, RequestOptions
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

    def resolve(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        generation: GenerationConfig,
        *,
        fresh_seed: int,
        arrival_time: float,
        deadline: float | None = None,
        options: RequestOptions = NO_OPTIONS,
        grammar: Grammar | None = None,
        num_checked: int = 0,
    ) -> Request:
        """Check a prompt and fill in what its config leaves open.

        The first `num_checked` ids are known to be in the vocabulary, which would take long to
        check in a text without end. Raises InvalidRequestError for an empty or over-long prompt,
        ids outside the vocabulary, and streaming where the engine has it not.
        """
        self._check_streams(generation.streaming)
        check_label("request_id", request_id)
        prompt, longest = tuple(prompt_token_ids), self.longest(generation.streaming)
        if not prompt:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        check_in_vocabulary("the prompt", prompt[num_checked:], self.vocab_size)
        check_room(len(prompt), longest)
        eos = () if generation.ignore_eos else self.eos_token_ids
        stop_token_ids = frozenset((*eos, *generation.stop_token_ids))
        _check_ids(generation, stop_token_ids, self.vocab_size)
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            generation=generation,
            max_new_tokens=_max_new_tokens(generation, longest - len(prompt)),
            stop_token_ids=stop_token_ids,
            seed=fresh_seed if generation.seed is None else generation.seed,
            arrival_time=arrival_time,
            deadline=options.end_time(arrival_time, deadline),
            options=options,
            grammar=grammar,
        )

    def completed(self, config: GenerationConfig) -> GenerationConfig:
        """What a request asks, with the engine's own streaming where that can be.

        Several choices can't stream; they end with the context.
        """
        if self.default_streaming is None or config.streaming is not None or config.n > 1:
            return config
        return replace(config, streaming=self.default_streaming)

    def check_session(self, streaming: Streaming | None) -> None:
        """Raise InvalidRequestError where there are no sessions, or none with streaming."""
        if not self.has_sessions:
            raise InvalidRequestError(
                "this engine records a trace, and a replay does not know what sessions keep: "
                "start it without a trace to open sessions"
            )
        self._check_streams(streaming)
        self.check_windows(streaming)

    def _check_streams(self, streaming: Streaming | None) -> None:
        if streaming is not None and not self.streams:
            raise InvalidRequestError(
                "this engine was not started for streaming: start it with --streaming "
                "(streaming=True in Python), or leave the streaming options out"
            )

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


def _max_new_tokens(generation: GenerationConfig, room: int) -> int:
    wanted = room if generation.max_new_tokens is None else generation.max_new_tokens
    # The step that scores the end of a prompt samples a token even if none is to be shown.
    return max(1, min(wanted, room))


def _check_ids(
    generation: GenerationConfig, stop_token_ids: frozenset[int], vocab_size: int
) -> None:
    allowed, banned = generation.allowed_token_ids, set(generation.banned_token_ids)
    for name, ids in (
        ("stop_token_ids", generation.stop_token_ids),
        ("logit_bias", [token_id for token_id, _ in dict(generation.logit_bias).items()]),
        ("allowed_token_ids", allowed or ()),
        ("banned_token_ids", generation.banned_token_ids),
        ("bad_words_ids", [i for word in generation.bad_words_ids for i in word]),
    ):
        check_in_vocabulary(name, ids, vocab_size)
    banned.update(word[0] for word in generation.bad_words_ids if len(word) == 1)
    if generation.min_new_tokens:
        banned |= stop_token_ids
    if not (len(banned) < vocab_size if allowed is None else set(allowed) - banned):
        raise InvalidRequestError(
            "no token is left to choose: every allowed id is banned (stop ids count as banned "
            "before min_new_tokens); allow more or ban fewer"
        )
