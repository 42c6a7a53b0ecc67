"""What a client asks and what it gets back: frozen values, validated at the door.

Imports msgspec and values of this package; both transports and the engine share it.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from swiftjax.engine.checks import MAX_TOKENS as MAX_TOKENS
from swiftjax.engine.generation import GenerationConfig as GenerationConfig
from swiftjax.engine.grammar import Grammar
from swiftjax.engine.request_options import NO_OPTIONS as NO_OPTIONS
from swiftjax.engine.request_options import RequestOptions as RequestOptions

FinishReason = Literal["stop", "length", "abort", "time_limit", "error"]
Prompt = str | SequenceOf[int]
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), most likely first


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One accepted request, tokens in. `deadline` is in seconds of `time.monotonic()`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    generation: GenerationConfig
    max_new_tokens: int  # resolved against max_model_len
    stop_token_ids: frozenset[int]  # EOS ids united with the request's own; empty of EOS if ignored
    seed: int
    arrival_time: float
    deadline: float | None = None
    options: RequestOptions = NO_OPTIONS
    grammar: Grammar | None = field(default=None, compare=False, repr=False)
    fork_of: str | None = None  # id of an equal prompt, from whose pages it starts if it runs
    session: str = ""  # whose pages it starts from and leaves its own to


class PromptLogprobs(NamedTuple):
    """One entry per prompt token; the first has nothing before it: None, and no alternatives."""

    logprobs: tuple[float | None, ...]
    top_logprobs: tuple[TopLogprobs, ...]


class StepOutput(NamedTuple):
    """What one step produced for one choice of one request.

    `finish_reason == "stop"` says that the last of `token_ids` is a stop token: it counts as a
    token but its text is not shown. `prompt` comes with the first token, if it was asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    index: int = 0
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt: PromptLogprobs | None = None
    num_cached_tokens: int = 0  # of the prompt, not computed for this choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Seconds since the request arrived; `first_token` is None when no token was made."""

    first_token: float | None
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One of the `n` answers. `top_logprobs` has an entry per token where it was asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = field(repr=False)
    top_logprobs: tuple[TopLogprobs, ...] = field(repr=False)
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The whole answer to one request; its short names speak of the first choice."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    timings: Timings
    prompt: PromptLogprobs | None = field(repr=False)
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache by the first choice

    @property
    def id(self) -> str:
        """The request id."""
        return self.request_id

    @property
    def text(self) -> str:
        """The generated text, after the prompt's if that is echoed."""
        return self.choices[0].text

    @property
    def output(self) -> str:
        """The same as `text`."""
        return self.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The log-probability of every generated token."""
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended."""
        return self.choices[0].finish_reason


class StreamOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What arrived for one choice since the last one: deltas; counts are totals of the choice.

    (A struct because one is made for every message: a frozen dataclass takes ten times as long.)
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    matched_stop: str | int | None = None  # the stop string or stop token id that ended it
    index: int = 0
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt: PromptLogprobs | None = None
    num_cached_tokens: int = 0  # of the prompt, not computed for this choice
