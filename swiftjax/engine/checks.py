"""Checks of single values that came from outside, with messages that name value and limit.

Knows no request and no model. Called by everything that validates what a client asks.
"""

import math
import unicodedata
from collections.abc import Sequence as SequenceOf

from swiftjax.errors import InvalidRequestError

MAX_TOKENS = 2**31 - 1
MAX_LABEL_CHARS = 128
# Control characters, lone surrogates, line and paragraph separators: they could forge log lines.
_UNFIT = ("Cc", "Cs", "Zl", "Zp")


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise InvalidRequestError unless it is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r:.80}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}; it must lie in [{low}, {high}]")


def check_float(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidRequestError unless it is a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value!r:.80}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}; it must lie in [{low:g}, {high:g}]")


def check_label(name: str, value: object) -> None:
    """Raise InvalidRequestError unless it is a short text that is safe to log and echo."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be text, not {value!r:.80}")
    if len(value) > MAX_LABEL_CHARS:
        raise InvalidRequestError(
            f"{name} has {len(value)} characters; at most {MAX_LABEL_CHARS} are taken"
        )
    if value.isprintable():  # as nearly all are: nothing to look for
        return
    unfit = [char for char in value if unicodedata.category(char) in _UNFIT]
    if unfit:
        raise InvalidRequestError(
            f"{name} contains the control character {unfit[0]!a}: leave it out"
        )


def check_count(name: str, count: int, limit: int) -> None:
    """Raise InvalidRequestError when a list is longer than its limit."""
    if count > limit:
        raise InvalidRequestError(f"{count} {name}; at most {limit} are taken")


def take_ids(name: str, ids: SequenceOf[int], limit: int) -> tuple[int, ...]:
    """Copy a list of token ids that is short enough; whether the vocabulary has them is open."""
    check_count(f"ids in {name}", len(ids), limit)
    for token_id in ids:
        check_int(f"an id in {name}", token_id, 0, MAX_TOKENS)
    return tuple(ids)


def check_in_vocabulary(name: str, ids: SequenceOf[int], vocab_size: int) -> None:
    """Raise InvalidRequestError for an id that is no integer or that the vocabulary lacks."""
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError(f"{name} must be integers, not {token_id!r:.80}")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name}: token id {token_id} is outside the vocabulary [0, {vocab_size})"
            )


def check_room(num_tokens: int, max_model_len: int) -> None:
    """Raise InvalidRequestError for a prompt that leaves no room for a new token."""
    if num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens; max_model_len is {max_model_len}, which must "
            f"hold the prompt and at least one new token: shorten it to {max_model_len - 1}"
        )
