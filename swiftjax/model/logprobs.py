"""Log-probabilities: of chosen tokens, of the most likely ones, and of a prompt's own tokens.

Always from scores in float32. Called by `sampling.py` and by the step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from swiftjax.batch import NONE, NUM_TOP
from swiftjax.model.filters import sortable

# Rows of logits alive at a time while a prompt is scored.
PROMPT_BLOCK = 128


class TokenScores(NamedTuple):
    """Log-probabilities of one token per row and of the most likely ones, as arrays in jit."""

    logprobs: Array  # [rows] float32
    top_ids: Array  # [rows NUM_TOP] int32, NONE past a small vocabulary
    top_logprobs: Array  # [rows NUM_TOP] float32


def log_total(logits: Float[Array, "R V"]) -> Float[Array, " R"]:
    """What to take from a score to get its log-probability."""
    return jax.nn.logsumexp(logits, axis=-1)


def token_logprobs(
    logits: Float[Array, "R V"], total: Float[Array, " R"], token_ids: Int[Array, " R"]
) -> Float[Array, " R"]:
    """The log-probability of one token per row; `total` is the `log_total` of the logits."""
    return jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0] - total


def top_logprobs(
    logits: Float[Array, "R V"], total: Float[Array, " R"]
) -> tuple[Int[Array, "R top"], Float[Array, "R top"]]:
    """The NUM_TOP most likely tokens of each row; of equal ones the lower id comes first.

    One pass over the scores for each, as a GPU would sort the whole vocabulary for `top_k`.
    """
    num_rows, vocab_size = logits.shape
    keys, ids = sortable(logits), lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def next_best(last: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        key, token = last[0][:, None], last[1][:, None]
        comes_later = (keys < key) | ((keys == key) & (ids > token))
        rest = jnp.where(comes_later, keys, 0)
        best = jnp.argmax(rest, axis=-1).astype(jnp.int32)
        return (jnp.max(rest, axis=-1), best), best

    before_all = (jnp.full(num_rows, 2**32 - 1, jnp.uint32), jnp.full(num_rows, -1, jnp.int32))
    _, tokens = lax.scan(next_best, before_all, length=min(NUM_TOP, vocab_size))
    logprobs = jnp.take_along_axis(logits, tokens.T, axis=-1) - total[:, None]
    padding = ((0, 0), (0, NUM_TOP - tokens.shape[0]))
    return (
        jnp.pad(tokens.T, padding, constant_values=NONE),
        jnp.pad(logprobs, padding),
    )


def no_scores(num_rows: int) -> TokenScores:
    """Zeros, in the shape of scores."""
    return TokenScores(
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros((num_rows, NUM_TOP), jnp.int32),
        jnp.zeros((num_rows, NUM_TOP), jnp.float32),
    )


def score_prompt(
    head: Callable[[Array], Array],
    hidden: Float[Array, "T D"],
    target_ids: Int[Array, " T"],
) -> TokenScores:
    """Score target_ids[t] from hidden[t]; targets of NONE get values without meaning.

    `head` maps [rows D] to logits [rows V]. Only blocks from the first to the last target are
    computed, one at a time; without targets, none.
    """
    num_tokens = hidden.shape[0]
    size = min(PROMPT_BLOCK, num_tokens)
    wanted = target_ids != NONE
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    first = jnp.min(jnp.where(wanted, tokens, num_tokens)) // size
    stop = (jnp.max(jnp.where(wanted, tokens, -1)) + size) // size

    def score_block(block: Array, scores: TokenScores) -> TokenScores:
        # The last block of a length that is no multiple overlaps the one before.
        start = jnp.minimum(block * size, num_tokens - size)
        logits = head(lax.dynamic_slice_in_dim(hidden, start, size)).astype(jnp.float32)
        targets = lax.dynamic_slice_in_dim(target_ids, start, size)
        targets = jnp.minimum(targets, logits.shape[1] - 1)
        total = log_total(logits)
        logprobs = token_logprobs(logits, total, targets)
        parts = TokenScores(logprobs, *top_logprobs(logits, total))
        return TokenScores(
            *(
                lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)
                for whole, part in zip(scores, parts, strict=True)
            )
        )

    return lax.fori_loop(first, stop, score_block, no_scores(num_tokens))
