"""Sampling on the device. All settings are rows of arrays, so that no mix of them ever recompiles.

The random numbers of a row depend on its (seed, position) and on nothing else: not on the batch,
not on the row it sits in.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from swiftjax.batch import SamplingBatch


def sample(
    logits: Float[Array, "R V"], sampling: SamplingBatch
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Draw one token per row; also its log-probability under the raw logits.

    Temperature is applied first, then top-k, then top-p (Holtzman et al., "The Curious Case of
    Neural Text Degeneration"). The most likely token is always kept.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = sampling.temperature > 0.0
    # Sorting and drawing over the whole vocabulary is worth skipping when all rows are greedy.
    tokens = lax.cond(
        jnp.any(is_random),
        lambda: jnp.where(is_random, _draw(logits, sampling), greedy),
        lambda: greedy,
    )
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)


def _draw(logits: Float[Array, "R V"], sampling: SamplingBatch) -> Int[Array, " R"]:
    """Gumbel-max: argmax(logits / T + noise) over the kept tokens is a draw from the softmax."""
    temperature = jnp.where(sampling.temperature > 0.0, sampling.temperature, 1.0)
    scaled = logits / temperature[:, None]
    noisy = scaled + _gumbel_noise(sampling.seeds, sampling.sample_positions, logits.shape[1])
    has_limit = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1.0))
    return lax.cond(
        has_limit,
        lambda: _argmax_kept(scaled, noisy, sampling),
        lambda: jnp.argmax(noisy, axis=-1).astype(jnp.int32),
    )


def _argmax_kept(
    scaled: Float[Array, "R V"], noisy: Float[Array, "R V"], sampling: SamplingBatch
) -> Int[Array, " R"]:
    order = jnp.argsort(scaled, axis=-1, descending=True, stable=True)
    kept = keep_mask(jnp.take_along_axis(scaled, order, axis=-1), sampling.top_k, sampling.top_p)
    # The noise belongs to the token id, not to its rank, so this is the unlimited draw masked.
    candidates = jnp.where(kept, jnp.take_along_axis(noisy, order, axis=-1), -jnp.inf)
    best = jnp.argmax(candidates, axis=-1)[:, None]
    return jnp.take_along_axis(order, best, axis=-1)[:, 0].astype(jnp.int32)


def keep_mask(
    ordered: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]
) -> Bool[Array, "R V"]:
    """Which entries of descending logits survive top-k (0: no limit), then top-p."""
    rank = lax.broadcasted_iota(jnp.int32, ordered.shape, 1)
    limit = jnp.where(top_k > 0, top_k, ordered.shape[1])
    in_top_k = rank < limit[:, None]
    probs = jax.nn.softmax(jnp.where(in_top_k, ordered, -jnp.inf), axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    # At top_p = 1 a rounded sum may reach 1 early, so the limit is lifted rather than compared.
    in_top_p = (mass_before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    return (in_top_k & in_top_p) | (rank == 0)


def _gumbel_noise(
    seeds: Int[Array, "R 2"], positions: Int[Array, " R"], vocab_size: int
) -> Float[Array, "R V"]:
    def row(seed: Int[Array, " 2"], position: Int[Array, ""]) -> Float[Array, " V"]:
        bits = lax.bitcast_convert_type(seed, jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(bits, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(seeds, positions)
