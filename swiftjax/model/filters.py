"""Which tokens may be drawn: top-k, top-p, min-p and typical sampling, in this order.

Every filter sees the probabilities, made to sum to one again, of what the filters before it kept,
and keeps at least one token. Nothing is sorted: a cut-off is found by bisection on the bits of the
scores, because sorting a vocabulary for each row costs a GPU more than reading it 25 times.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt, UInt32

from swiftjax.batch import SamplingBatch

# A filter with a limit of nothing keeps the first token all the same.
SMALLEST_LIMIT = 1e-30
BITS_PER_PASS = 3


def keep_mask(
    scores: Float[Array, "R V"], keys: UInt[Array, "R V"], sampling: SamplingBatch
) -> Bool[Array, "R V"]:
    """Which tokens top-k, top-p and min-p let through. Of equal scores the lower id comes first.

    `keys` are in the order of the scores; those of 16 bits take half of the passes.
    top-k (0: no limit); top-p: the smallest set whose probability reaches it (Holtzman et al.);
    min-p: at least that share of the largest probability (Nguyen et al.).
    """
    limit = jnp.where(sampling.top_k > 0, sampling.top_k, scores.shape[1]).astype(jnp.float32)
    kept = first_to_reach(keys, jnp.ones_like(scores), limit)
    probs = jax.nn.softmax(jnp.where(kept, scores, -jnp.inf), axis=-1)
    kept &= first_to_reach(keys, probs, _lifted_at_one(sampling.top_p))
    return kept & (probs >= sampling.min_p[:, None] * jnp.max(probs, axis=-1, keepdims=True))


def typical_mask(
    scores: Float[Array, "R V"], kept: Bool[Array, "R V"], sampling: SamplingBatch
) -> Bool[Array, "R V"]:
    """Of the kept, those whose surprise is nearest to the entropy, until their sum is typical_p.

    Meister et al., locally typical sampling.
    """
    logp = jax.nn.log_softmax(jnp.where(kept, scores, -jnp.inf), axis=-1)
    probs = jnp.exp(logp)
    entropy = -jnp.sum(jnp.where(probs > 0.0, probs * logp, 0.0), axis=-1, keepdims=True)
    nearest = sortable(-jnp.abs(logp + entropy))
    return kept & first_to_reach(nearest, probs, _lifted_at_one(sampling.typical_p))


def _lifted_at_one(mass: Float[Array, " R"]) -> Float[Array, " R"]:
    # A rounded sum may reach 1 early, so that limit is lifted rather than compared.
    return jnp.where(mass >= 1.0, jnp.inf, mass)


def sortable(scores: Float[Array, "R V"]) -> UInt[Array, "R V"]:
    """Integers as wide as the scores and in their order, -0 and 0 being equal."""
    num_bits = 8 * scores.dtype.itemsize
    kind = jnp.dtype(f"uint{num_bits}")
    bits = lax.bitcast_convert_type(jnp.where(scores == 0.0, 0.0, scores), kind)
    sign = kind.type(1 << (num_bits - 1))
    return jnp.where(bits >= sign, ~bits, bits | sign)


def first_to_reach(
    keys: UInt[Array, "R V"], weights: Float[Array, "R V"], limit: Float[Array, " R"]
) -> Bool[Array, "R V"]:
    """Of each row the fewest entries whose weights reach `limit`, one at least.

    Taken by descending key, of equal keys from the left; all where the sum stays below.
    """
    vocab_size = keys.shape[1]
    limit = jnp.maximum(limit, SMALLEST_LIMIT)
    cut = _largest_reaching(keys, weights, limit, num_bits=8 * keys.dtype.itemsize)
    wide = keys.astype(jnp.uint32)
    above, tied = wide > cut[:, None], wide == cut[:, None]
    missing = limit - jnp.sum(jnp.where(above, weights, 0.0), axis=-1)
    from_right = vocab_size - 1 - lax.broadcasted_iota(jnp.uint32, keys.shape, 1)
    last = _largest_reaching(
        from_right, jnp.where(tied, weights, 0.0), missing, num_bits=(vocab_size - 1).bit_length()
    )
    return above | (tied & (from_right >= last[:, None]))


def _largest_reaching(
    keys: UInt[Array, "R V"],
    weights: Float[Array, "R V"],
    limit: Float[Array, " R"],
    *,
    num_bits: int,
) -> UInt32[Array, " R"]:
    """The largest x < 2^num_bits for which the weights of keys >= x reach `limit`; else 0."""
    num_passes = -(-num_bits // BITS_PER_PASS)

    def narrow(i: Array, cut: UInt32[Array, " R"]) -> UInt32[Array, " R"]:
        """Settle a few more bits: sums only fall as x grows, so count how many candidates do."""
        shift = (BITS_PER_PASS * (num_passes - 1 - i)).astype(jnp.uint32)
        digit = jnp.zeros_like(cut)
        for step in range(1, 1 << BITS_PER_PASS):
            # Of an odd number of bits the first pass settles fewer, and must not wrap around.
            is_wide = (jnp.uint32(step) << shift) >> shift == step
            candidate = cut + (jnp.uint32(step) << shift)
            heavy = jnp.where(keys.astype(jnp.uint32) >= candidate[:, None], weights, 0.0)
            reaches = is_wide & (jnp.sum(heavy, axis=-1) >= limit)
            digit += reaches.astype(jnp.uint32)
        return cut + (digit << shift)

    return lax.fori_loop(0, num_passes, narrow, jnp.zeros(keys.shape[0], jnp.uint32))
