"""Which tokens may be drawn: top-k, top-p, min-p and typical sampling, in this order.

Works on scores in descending order. Every filter sees the probabilities, made to sum to one again,
of what the filters before it kept, and keeps at least one token.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from swiftjax.batch import SamplingBatch


def has_filters(sampling: SamplingBatch) -> Bool[Array, ""]:
    """Whether any row limits what may be drawn."""
    limits = (sampling.top_k > 0) | (sampling.top_p < 1.0)
    return jnp.any(limits | (sampling.min_p > 0.0) | (sampling.typical_p < 1.0))


def keep_mask(ordered: Float[Array, "R V"], sampling: SamplingBatch) -> Bool[Array, "R V"]:
    """Which entries of descending scores survive.

    top-k (0: no limit); top-p: the smallest set whose probability reaches it (Holtzman et al.);
    min-p: at least that share of the largest probability (Nguyen et al.); typical (Meister et al.).
    """
    rank = lax.broadcasted_iota(jnp.int32, ordered.shape, 1)
    limit = jnp.where(sampling.top_k > 0, sampling.top_k, ordered.shape[1])
    kept = rank < limit[:, None]
    probs = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=-1)
    kept &= _within(jnp.cumsum(probs, axis=-1) - probs, sampling.top_p)
    kept &= probs >= sampling.min_p[:, None] * probs[:, :1]
    kept |= rank == 0
    return lax.cond(
        jnp.any(sampling.typical_p < 1.0),
        lambda: kept & _typical_mask(jnp.where(kept, ordered, -jnp.inf), sampling),
        lambda: kept,
    )


def _within(mass_before: Float[Array, "R V"], mass: Float[Array, " R"]) -> Bool[Array, "R V"]:
    # At 1 a rounded sum may reach 1 early, so the limit is lifted rather than compared.
    return (mass_before < mass[:, None]) | (mass[:, None] >= 1.0)


def _typical_mask(ordered: Float[Array, "R V"], sampling: SamplingBatch) -> Bool[Array, "R V"]:
    """The tokens whose surprise is nearest to the entropy, up to the probability typical_p."""
    logp = jax.nn.log_softmax(ordered, axis=-1)
    probs = jnp.exp(logp)
    entropy = -jnp.sum(jnp.where(probs > 0.0, probs * logp, 0.0), axis=-1, keepdims=True)
    order = jnp.argsort(jnp.abs(logp + entropy), axis=-1, stable=True)
    mass = jnp.take_along_axis(probs, order, axis=-1)
    kept = _within(jnp.cumsum(mass, axis=-1) - mass, sampling.typical_p)
    kept |= lax.broadcasted_iota(jnp.int32, ordered.shape, 1) == 0
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
