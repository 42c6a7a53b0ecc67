"""Changes to single scores: penalties for tokens seen before, biases, bans. All rows of arrays.

The token counts live on the device, because the next step needs the token of the last one before
the host has read it. A count is the prompt bit plus the uses in the output.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16

from swiftjax.batch import MAX_COUNT, PROMPT_BIT, SamplingBatch, TokenEdits

Counts = UInt16[Array, "rows V"]


def apply_penalties(
    logits: Float[Array, "R V"], counts: Counts, sampling: SamplingBatch
) -> Float[Array, "R V"]:
    """Repetition (Keskar et al., CTRL) over prompt and output, then frequency and presence.

    Repetition divides positive scores and multiplies negative ones, so both fall; the other two
    subtract, and see the output only.
    """
    own = counts.at[sampling.count_rows].get(mode="fill", fill_value=0)
    used = (own & jnp.uint16(MAX_COUNT)).astype(jnp.float32)
    factor = sampling.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0.0, logits / factor, logits * factor)
    logits = jnp.where(own > 0, repeated, logits)
    logits = logits - sampling.frequency_penalty[:, None] * used
    return logits - sampling.presence_penalty[:, None] * (used > 0.0).astype(jnp.float32)


def count_sampled(counts: Counts, rows: Int[Array, " R"], token_ids: Int[Array, " R"]) -> Counts:
    """Count one new output token per row; rows past the end are dropped."""
    old = counts.at[rows, token_ids].get(mode="fill", fill_value=0)
    is_full = (old & jnp.uint16(MAX_COUNT)) == jnp.uint16(MAX_COUNT)
    return counts.at[rows, token_ids].set(old + (~is_full).astype(jnp.uint16), mode="drop")


def empty_counts(num_rows: int, vocab_size: int) -> Counts:
    """Nothing seen, in any row."""
    assert PROMPT_BIT > MAX_COUNT
    return jnp.zeros((num_rows, vocab_size), jnp.uint16)


def apply_edits(logits: Float[Array, "R V"], edits: TokenEdits) -> Float[Array, "R V"]:
    """Add each row's listed values; where only listed tokens are allowed, ban all others."""
    others = jnp.where(edits.only_listed > 0, -jnp.inf, 0.0).astype(jnp.float32)
    change = jnp.broadcast_to(others[:, None], logits.shape)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits + change.at[rows, edits.ids].set(edits.values, mode="drop")


def apply_masks(logits: Float[Array, "R V"], masks: Int[Array, "R W"]) -> Float[Array, "R V"]:
    """Ban every token whose bit is not set; a row keeps at least one."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    is_allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] > 0
    return jnp.where(is_allowed, logits, -jnp.inf)
