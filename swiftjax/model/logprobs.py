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

# Rows of logits alive at a time while a prompt is scored.
PROMPT_BLOCK = 128


class TokenScores(NamedTuple):
    """Log-probabilities of one token per row and of the most likely ones, as arrays in jit."""

    logprobs: Array  # [rows] float32
    top_ids: Array  # [rows NUM_TOP] int32, NONE past a small vocabulary
    top_logprobs: Array  # [rows NUM_TOP] float32


def token_logprobs(logits: Float[Array, "R V"], token_ids: Int[Array, " R"]) -> Float[Array, " R"]:
    """The log-probability of one token per row."""
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def top_logprobs(
    logits: Float[Array, "R V"],
) -> tuple[Int[Array, "R top"], Float[Array, "R top"]]:
    """The NUM_TOP most likely tokens of each row."""
    count = min(NUM_TOP, logits.shape[1])
    values, ids = lax.top_k(logits, count)
    logprobs = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    padding = ((0, 0), (0, NUM_TOP - count))
    return (
        jnp.pad(ids.astype(jnp.int32), padding, constant_values=NONE),
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
        parts = TokenScores(token_logprobs(logits, targets), *top_logprobs(logits))
        return TokenScores(
            *(
                lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)
                for whole, part in zip(scores, parts, strict=True)
            )
        )

    return lax.fori_loop(first, stop, score_block, no_scores(num_tokens))
