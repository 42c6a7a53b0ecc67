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

from swiftjax.batch import ALL_ALLOWED, NONE, SamplingBatch, TokenEdits
from swiftjax.model.filters import has_filters, keep_mask
from swiftjax.model.logprobs import TokenScores, no_scores, token_logprobs, top_logprobs
from swiftjax.model.penalties import Counts, apply_edits, apply_masks, apply_penalties


class SampledTokens(NamedTuple):
    """One token per row and its scores, as arrays in jit."""

    token_ids: Array  # [R] int32
    scores: TokenScores  # of R rows


def greedy(logits: Float[Array, "R V"]) -> SampledTokens:
    """The most likely token of every row, with its raw log-probability and no alternatives."""
    return _with_raw_logprobs(logits, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def draw(logits: Float[Array, "R V"], sampling: SamplingBatch) -> SampledTokens:
    """A draw from the whole distribution at each row's temperature; greedy rows may be among them.

    Scores as from `greedy`. What `sample` gives when nothing but temperatures is set.
    """
    is_random = sampling.temperature > 0.0
    scaled = logits / jnp.where(is_random, sampling.temperature, 1.0)[:, None]
    drawn = jnp.argmax(_add_noise(scaled, sampling), axis=-1)
    best = jnp.argmax(logits, axis=-1)
    return _with_raw_logprobs(logits, jnp.where(is_random, drawn, best).astype(jnp.int32))


def _with_raw_logprobs(logits: Float[Array, "R V"], token_ids: Int[Array, " R"]) -> SampledTokens:
    scores = no_scores(logits.shape[0])
    return SampledTokens(token_ids, scores._replace(logprobs=token_logprobs(logits, token_ids)))


def _has_edits(edits: TokenEdits) -> Bool[Array, ""]:
    no_limit = edits.only_listed == 0
    return jnp.any(~no_limit | (edits.ids[:, 0] != NONE))


def _has_penalties(sampling: SamplingBatch) -> Bool[Array, ""]:
    changes = (sampling.presence_penalty != 0.0) | (sampling.frequency_penalty != 0.0)
    return jnp.any(changes | (sampling.repetition_penalty != 1.0))


def sample(
    logits: Float[Array, "R V"],
    sampling: SamplingBatch,
    edits: TokenEdits,
    counts: Counts,
    masks: Int[Array, "R W"] | None = None,
) -> SampledTokens:
    """Choose one token per row; the log-probabilities are raw except where processed are asked.

    Processed ones are of the scores after penalties, edits and temperature, before the filters.
    """
    changed = lax.cond(
        _has_penalties(sampling),
        lambda: apply_penalties(logits, counts, sampling),
        lambda: logits,
    )
    changed = lax.cond(_has_edits(edits), lambda: apply_edits(changed, edits), lambda: changed)
    if masks is not None:
        changed = lax.cond(
            jnp.any(masks != ALL_ALLOWED), lambda: apply_masks(changed, masks), lambda: changed
        )
    is_random = sampling.temperature > 0.0
    scaled = changed / jnp.where(is_random, sampling.temperature, 1.0)[:, None]
    greedy = jnp.argmax(changed, axis=-1).astype(jnp.int32)
    token_ids = lax.cond(
        jnp.any(is_random),
        lambda: jnp.where(is_random, _draw(scaled, sampling), greedy),
        lambda: greedy,
    )
    reported = jnp.where(sampling.processed[:, None] > 0, scaled, logits)
    none = no_scores(logits.shape[0])
    top_ids, top = lax.cond(
        jnp.any(sampling.num_logprobs > 0),
        lambda: top_logprobs(reported),
        lambda: (none.top_ids, none.top_logprobs),
    )
    return SampledTokens(token_ids, TokenScores(token_logprobs(reported, token_ids), top_ids, top))


def _draw(scaled: Float[Array, "R V"], sampling: SamplingBatch) -> Int[Array, " R"]:
    """Gumbel-max: argmax(logits / T + noise) over the kept tokens is a draw from the softmax."""
    noisy = _add_noise(scaled, sampling)
    return lax.cond(
        has_filters(sampling),
        lambda: _argmax_kept(scaled, noisy, sampling),
        lambda: jnp.argmax(noisy, axis=-1).astype(jnp.int32),
    )


def _add_noise(scaled: Float[Array, "R V"], sampling: SamplingBatch) -> Float[Array, "R V"]:
    return scaled + _gumbel_noise(sampling.seeds, sampling.sample_positions, scaled.shape[1])


def _argmax_kept(
    scaled: Float[Array, "R V"], noisy: Float[Array, "R V"], sampling: SamplingBatch
) -> Int[Array, " R"]:
    order = jnp.argsort(scaled, axis=-1, descending=True, stable=True)
    kept = keep_mask(jnp.take_along_axis(scaled, order, axis=-1), sampling)
    # The noise belongs to the token id, not to its rank, so this is the unlimited draw masked.
    candidates = jnp.where(kept, jnp.take_along_axis(noisy, order, axis=-1), -jnp.inf)
    best = jnp.argmax(candidates, axis=-1)[:, None]
    return jnp.take_along_axis(order, best, axis=-1)[:, 0].astype(jnp.int32)


def _gumbel_noise(
    seeds: Int[Array, "R 2"], positions: Int[Array, " R"], vocab_size: int
) -> Float[Array, "R V"]:
    def row(seed: Int[Array, " 2"], position: Int[Array, ""]) -> Float[Array, " V"]:
        bits = lax.bitcast_convert_type(seed, jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(bits, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(seeds, positions)
