"""How to generate: one frozen value, checked when it is made, whatever the transport.

Ranges and meanings are listed in docs/sampling.md. What needs the model (ids inside the vocabulary,
room in the context) is checked in `limits.py`.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

from swiftjax.engine.checks import MAX_TOKENS, check_count, check_float, check_int, take_ids
from swiftjax.engine.constraint import Constraint
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError

LogprobsMode = Literal["raw", "processed"]

# Below this a draw is as good as greedy, and scores divided by it might overflow.
MIN_TEMPERATURE = 1e-5
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_IDS = 1024
MAX_BANNED_IDS = 512
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LEN = 32

# name, lowest, highest
_FLOATS = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """How to generate. Raises InvalidRequestError for a value outside its range.

    `max_new_tokens` beyond what max_model_len leaves (None: no limit of its own) is cut to what
    is left, and the answer then ends with finish_reason "length"; 0 only scores or echoes the
    prompt. `temperature=0` is greedy, and so is anything below MIN_TEMPERATURE. `top_k` 0 or -1
    keeps the whole vocabulary; `top_p=0` keeps the most likely token only. Without a `seed` the
    engine draws a fresh one per request; the same seed gives the same tokens in any batch, and
    choice i > 0 of `n` has a seed derived from it. `bad_words_ids` are token sequences that never
    appear. `logprobs` and `prompt_logprobs` ask for that many most likely tokens beside each
    token; with `echo`, `logprobs` holds for the prompt too. A `constraint` says what the text must
    look like; an answer that ends by its length may not be complete. With `streaming`, in an engine
    built for it, max_model_len limits neither prompt nor answer.
    """

    max_new_tokens: int | None = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: SequenceOf[int] | None = None
    banned_token_ids: SequenceOf[int] = ()
    bad_words_ids: SequenceOf[SequenceOf[int]] = ()
    seed: int | None = None
    n: int = 1
    stop: str | SequenceOf[str] = ()
    stop_token_ids: SequenceOf[int] = ()
    include_stop_str: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    echo: bool = False
    constraint: Constraint | None = None
    streaming: Streaming | None = None

    def __post_init__(self) -> None:
        for name, low, high in _FLOATS:
            check_float(name, getattr(self, name), low, high)
        top_k = 0 if self.top_k == -1 else self.top_k
        check_int("top_k", top_k, 0, MAX_TOKENS)
        check_int("n", self.n, 1, MAX_CHOICES)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        self._set(
            temperature=0.0 if self.temperature < MIN_TEMPERATURE else self.temperature,
            top_k=top_k,
            stop=_take_stops(self.stop),
            stop_token_ids=take_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            logit_bias=_take_bias(self.logit_bias),
            allowed_token_ids=_take_allowed(self.allowed_token_ids),
            banned_token_ids=take_ids("banned_token_ids", self.banned_token_ids, MAX_BANNED_IDS),
            bad_words_ids=_take_words(self.bad_words_ids),
        )
        self._check_outputs()
        self._check_lengths()
        if self.constraint is not None:
            self._check_constraint()
        if self.streaming is not None and self.n > 1:
            raise InvalidRequestError(f"n is {self.n}; with streaming it must be 1")

    def _set(self, **values: object) -> None:
        """Replace fields by their checked and copied forms; only while it is being made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_outputs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logprobs_mode not in ("raw", "processed"):
            raise InvalidRequestError(
                f"logprobs_mode must be 'raw' or 'processed', not {self.logprobs_mode!r:.80}"
            )
        if self.echo and self.prompt_logprobs is None:
            self._set(prompt_logprobs=self.logprobs)

    def _check_constraint(self) -> None:
        """What would leave a constraint without a token to go on with, or without an end."""
        in_the_way = {
            "min_new_tokens": self.min_new_tokens > 0,
            "allowed_token_ids": self.allowed_token_ids is not None,
            "banned_token_ids": bool(self.banned_token_ids),
            "bad_words_ids": bool(self.bad_words_ids),
            "ignore_eos": self.ignore_eos,
        }
        if named := [name for name, is_set in in_the_way.items() if is_set]:
            raise InvalidRequestError(f"a constraint does not go with {' and '.join(named)}")

    def _check_lengths(self) -> None:
        check_int("min_new_tokens", self.min_new_tokens, 0, MAX_TOKENS)
        if self.max_new_tokens is None:
            return
        scores_only = self.echo or self.prompt_logprobs is not None
        check_int("max_new_tokens", self.max_new_tokens, 0 if scores_only else 1, MAX_TOKENS)
        if self.max_new_tokens == 0 and self.n > 1:
            raise InvalidRequestError(f"n is {self.n}; with max_new_tokens 0 it must be 1")
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens is {self.min_new_tokens}; it must not be over max_new_tokens "
                f"({self.max_new_tokens})"
            )


def _take_stops(stop: str | SequenceOf[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    check_count("stop strings", len(texts), MAX_STOP_STRINGS)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"stop strings must be non-empty text, not {text!r:.80}")
        if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequestError(
                f"a stop string of {len(text)} characters is over {MAX_STOP_BYTES} bytes"
            )
    return tuple(texts)


def _take_bias(
    bias: Mapping[int, float] | tuple[tuple[int, float], ...],
) -> tuple[tuple[int, float], ...]:
    """Pairs of id and value, each id once."""
    check_count("logit_bias entries", len(bias), MAX_LOGIT_BIAS)
    pairs = dict(bias)
    if not isinstance(bias, Mapping) and len(pairs) < len(bias):
        ids = [token_id for token_id, _ in bias]
        twice = next(token_id for token_id in ids if ids.count(token_id) > 1)
        raise InvalidRequestError(f"logit_bias names token {twice} twice: give one value for it")
    for token_id, value in pairs.items():
        check_int("a logit_bias id", token_id, 0, MAX_TOKENS)
        check_float(f"logit_bias of token {token_id}", value, -100.0, 100.0)
    return tuple((token_id, float(value)) for token_id, value in pairs.items())


def _take_allowed(ids: SequenceOf[int] | None) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not len(ids):
        raise InvalidRequestError("allowed_token_ids is empty: allow at least one id, or leave it")
    return take_ids("allowed_token_ids", ids, MAX_ALLOWED_IDS)


def _take_words(words: SequenceOf[SequenceOf[int]]) -> tuple[tuple[int, ...], ...]:
    check_count("bad_words_ids", len(words), MAX_BAD_WORDS)
    if any(not len(word) for word in words):
        raise InvalidRequestError("an entry of bad_words_ids is empty: give at least one id")
    return tuple(take_ids("a bad word", word, MAX_BAD_WORD_LEN) for word in words)
