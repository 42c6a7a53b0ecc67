"""What a client asks and what it gets back: frozen values, validated at the door.

Imports nothing but the standard library and `errors`; both transports and the engine share it.
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from swiftjax.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "time_limit", "error"]
Prompt = str | SequenceOf[int]

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """How to generate. Raises InvalidRequestError for a value outside its range.

    `max_new_tokens` beyond what max_model_len leaves (None: no limit of its own) is cut to what
    is left, and the answer then ends with finish_reason "length". `temperature=0` is greedy.
    `top_k` 0 or -1 keeps the whole vocabulary; `top_p=0` keeps the most likely token only. Without
    a `seed` the engine draws a fresh one per request; the same seed gives the same tokens in any
    batch.
    """

    max_new_tokens: int | None = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | SequenceOf[str] = ()
    stop_token_ids: SequenceOf[int] = ()
    include_stop_str: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        if self.max_new_tokens is not None:
            _check_int("max_new_tokens", self.max_new_tokens, 1, MAX_TOKENS)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, 0, MAX_TOKENS)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        _check_stops(stop, tuple(self.stop_token_ids))


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}; it must lie in [{low}, {high}]")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}; it must lie in [{low:g}, {high:g}]")


def _check_stops(stop: tuple[str, ...], stop_token_ids: tuple[int, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"{len(stop)} stop strings; at most {MAX_STOP_STRINGS} are taken")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"stop strings must be non-empty text, not {text!r:.80}")
        if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequestError(
                f"a stop string of {len(text)} characters is over {MAX_STOP_BYTES} bytes"
            )
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"{len(stop_token_ids)} stop token ids; at most {MAX_STOP_TOKEN_IDS} are taken"
        )
    for token_id in stop_token_ids:
        _check_int("stop_token_ids", token_id, 0, MAX_TOKENS)


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
    priority: int = 0  # higher goes first, under the priority policy
    client_id: str = ""  # whose turn it is, under the fair policy
    cache_salt: str = ""  # cached pages are shared only between equal salts


class StepOutput(NamedTuple):
    """What one step produced for one request.

    `finish_reason == "stop"` says that the last of `token_ids` is a stop token: it counts as a
    token but its text is not shown.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Seconds since the request arrived; `first_token` is None when no token was made."""

    first_token: float | None
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The whole answer to one request; `id` and `output` are short names for two of its fields."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = field(repr=False)
    text: str
    finish_reason: FinishReason
    timings: Timings

    @property
    def id(self) -> str:
        """The request id."""
        return self.request_id

    @property
    def output(self) -> str:
        """The generated text."""
        return self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOutput:
    """What arrived since the last one: text and token ids are deltas, counts are totals."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    matched_stop: str | int | None = None  # the stop string or stop token id that ended it


def resolve_request(
    request_id: str,
    prompt_token_ids: SequenceOf[int],
    generation: GenerationConfig,
    *,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: SequenceOf[int],
    fresh_seed: int,
    arrival_time: float,
    deadline: float | None = None,
) -> Request:
    """Check a prompt against the model's limits and fill in what the config leaves open.

    Raises InvalidRequestError for an empty or over-long prompt and for ids outside the vocabulary.
    """
    prompt = tuple(prompt_token_ids)
    if not prompt:
        raise InvalidRequestError("the prompt is empty: give at least one token")
    for token_id in (*prompt, *generation.stop_token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError(f"token ids must be integers, not {token_id!r:.80}")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} is outside the vocabulary [0, {vocab_size})"
            )
    room = max_model_len - len(prompt)
    if room < 1:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens; max_model_len is {max_model_len}, which must "
            f"hold the prompt and at least one new token: shorten it to {max_model_len - 1}"
        )
    wanted = generation.max_new_tokens
    eos = () if generation.ignore_eos else tuple(eos_token_ids)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        generation=generation,
        max_new_tokens=room if wanted is None else min(wanted, room),
        stop_token_ids=frozenset((*eos, *generation.stop_token_ids)),
        seed=fresh_seed if generation.seed is None else generation.seed,
        arrival_time=arrival_time,
        deadline=deadline,
    )


def with_overrides(config: GenerationConfig, **changes: object) -> GenerationConfig:
    """A copy with some fields replaced (`None` means "leave as it is"), checked again."""
    return replace(config, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[arg-type]
