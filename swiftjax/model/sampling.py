"""Sampling on the device. All settings are rows of arrays, so that no mix of them ever recompiles.

The order: penalties, biases and bans, constraints, temperature, filters, draw. The random numbers
of a row depend on its (seed, position) and on nothing else: not on the batch, not on the row it
sits in.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from swiftjax.batch import SamplingBatch, TokenEdits
from swiftjax.model.filters import keep_mask, sortable, typical_mask
from swiftjax.model.logprobs import (
    TokenScores,
    log_total,
    no_scores,
    token_logprobs,
    top_logprobs,
)
from swiftjax.model.penalties import Counts, apply_edits, apply_masks, apply_penalties


class Logits(NamedTuple):
    """Raw scores of the rows to sample, as arrays in jit.

    The total is made once for all samplers, so that a log-probability has the same bits whichever
    of them a batch needs.
    """

    scores: Array  # [R V] in the model's dtype
    total: Array  # [R] float32, the `log_total` of the scores

    @property
    def wide(self) -> Float[Array, "R V"]:
        """The scores in float32."""
        return self.scores.astype(jnp.float32)


class SampledTokens(NamedTuple):
    """One token per row and its scores, as arrays in jit."""

    token_ids: Array  # [R] int32
    scores: TokenScores  # of R rows


def greedy(logits: Logits) -> SampledTokens:
    """The most likely token of every row, with its raw log-probability and no alternatives."""
    return _with_raw_logprobs(logits, _best(logits.scores))


def draw(logits: Logits, sampling: SamplingBatch) -> SampledTokens:
    """A draw from the whole distribution at each row's temperature; greedy rows may be among them.

    Scores as from `greedy`. What `sample` gives when nothing but temperatures is set.
    """
    scaled = _scaled(logits.wide, sampling)
    return _with_raw_logprobs(logits, _draw(logits.wide, scaled, None, sampling))


def draw_filtered(logits: Logits, sampling: SamplingBatch) -> SampledTokens:
    """The same from what top-k, top-p and min-p leave."""
    scaled = _scaled(logits.wide, sampling)
    # A temperature changes no order, and raw scores may be narrower.
    kept = keep_mask(scaled, sortable(logits.scores), sampling)
    return _with_raw_logprobs(logits, _draw(logits.wide, scaled, kept, sampling))


def sample(
    logits: Logits,
    sampling: SamplingBatch,
    edits: TokenEdits,
    counts: Counts,
    masks: Int[Array, "R W"] | None = None,
) -> SampledTokens:
    """Choose one token per row; the log-probabilities are raw except where processed are asked.

    Processed ones are of the scores after penalties, edits and temperature, before the filters.
    """
    changed = apply_edits(apply_penalties(logits.wide, counts, sampling), edits)
    if masks is not None:
        changed = apply_masks(changed, masks)
    scaled = _scaled(changed, sampling)
    kept = typical_mask(scaled, keep_mask(scaled, sortable(changed), sampling), sampling)
    token_ids = _draw(changed, scaled, kept, sampling)
    is_processed = sampling.processed > 0
    reported = jnp.where(is_processed[:, None], scaled, logits.wide)
    total = jnp.where(is_processed, log_total(scaled), logits.total)
    logprobs = token_logprobs(reported, total, token_ids)
    return SampledTokens(token_ids, TokenScores(logprobs, *top_logprobs(reported, total)))


def _with_raw_logprobs(logits: Logits, token_ids: Int[Array, " R"]) -> SampledTokens:
    logprobs = token_logprobs(logits.wide, logits.total, token_ids)
    return SampledTokens(token_ids, no_scores(token_ids.shape[0])._replace(logprobs=logprobs))


def _scaled(scores: Float[Array, "R V"], sampling: SamplingBatch) -> Float[Array, "R V"]:
    return scores / jnp.where(sampling.temperature > 0.0, sampling.temperature, 1.0)[:, None]


def _best(scores: Float[Array, "R V"]) -> Int[Array, " R"]:
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def _draw(
    scores: Float[Array, "R V"],
    scaled: Float[Array, "R V"],
    kept: Bool[Array, "R V"] | None,
    sampling: SamplingBatch,
) -> Int[Array, " R"]:
    """Gumbel-max: argmax(scores / T + noise) over the kept tokens is a draw from the softmax.

    At temperature 0 the best of all. The noise belongs to the token id, so filters change nothing
    in a draw that they would let through.
    """
    noisy = scaled + _gumbel_noise(sampling.seeds, sampling.sample_positions, scaled.shape[1])
    if kept is not None:
        noisy = jnp.where(kept, noisy, -jnp.inf)
    return jnp.where(sampling.temperature > 0.0, _best(noisy), _best(scores))


def _gumbel_noise(
    seeds: Int[Array, "R 2"], positions: Int[Array, " R"], vocab_size: int
) -> Float[Array, "R V"]:
    def row(seed: Int[Array, " 2"], position: Int[Array, ""]) -> Float[Array, " V"]:
        bits = lax.bitcast_convert_type(seed, jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(bits, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(seeds, positions)
