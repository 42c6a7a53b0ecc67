"""Rotary position embedding: inverse frequencies of every scaling kind, and exact angles.

The angle of position p is the sum of two angles, one for p % 1024 and one for p // 1024 (of three
beyond 1024 * 1024 positions); all come from small fp32 tables made in fp64 on the host, so cos and
sin stay exact to fp32 rounding wherever a token stands. Knows nothing of batches or pages; called
by `layer_inputs.py` and `sink_view.py`. The rotation itself is part of `kernels.rope_write`.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int32

from swiftjax.model_config import RopeConfig

LOW_BITS = 10
LOW_SIZE = 1 << LOW_BITS


class RopeTable(NamedTuple):
    """e^(i·f·r) for r < 1024 and a·e^(i·f·1024·q) as (cos, sin); a is the attention factor.

    `top`, where there is one, is e^(i·f·1024·1024·q); q in `high` then ends at 1024.
    """

    low: Float[Array, "1024 half 2"]
    high: Float[Array, "blocks half 2"]
    top: Float[Array, "regions half 2"] | None = None


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, length: int | None = None
) -> Float64[np.ndarray, " half"]:
    """Return the angle per position of each pair, in radians.

    `length` is the length of the sequence in tokens; only the dynamic kind reads it, and only where
    it exceeds `rope.original_max_position`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = rope.theta
    if rope.kind == "dynamic" and length is not None:
        base *= _dynamic_growth(rope, length) ** (head_dim / (head_dim - 2))
    frequencies = base**-exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim)
    return frequencies


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor on cos and sin; 1 for every kind but yarn (arXiv 2309.00071, eq. 22)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(
            rope.factor, rope.mscale_all_dim
        )
    return _yarn_mscale(rope.factor, 1.0)


def make_rope_table(rope: RopeConfig, head_dim: int, max_positions: int) -> RopeTable:
    """Make the tables for positions below `max_positions`; angles are computed in fp64."""
    frequencies = inverse_frequencies(rope, head_dim)
    num_blocks = max(1, -(-max_positions // LOW_SIZE))
    num_regions = -(-num_blocks // LOW_SIZE)
    low = _unit_circle(np.arange(LOW_SIZE), frequencies)
    blocks = np.arange(num_blocks if num_regions == 1 else LOW_SIZE)
    high = _unit_circle(blocks * LOW_SIZE, frequencies) * attention_factor(rope)
    low, high = jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32)
    if num_regions == 1:
        return RopeTable(low, high)
    top = _unit_circle(np.arange(num_regions) * LOW_SIZE**2, frequencies)
    return RopeTable(low, high, jnp.asarray(top, jnp.float32))


def rope_angles(
    table: RopeTable, positions: Int32[Array, " T"]
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Return fp32 cos and sin at each position, the attention factor included.

    Positions at or past the table's end are clamped to its last block. For every kind but dynamic.
    """
    low = jnp.take(table.low, positions & (LOW_SIZE - 1), axis=0, mode="clip")
    block = positions >> LOW_BITS
    if table.top is None:
        angles = _sum(low, jnp.take(table.high, block, axis=0, mode="clip"))
    else:
        high = jnp.take(table.high, block & (LOW_SIZE - 1), axis=0, mode="clip")
        top = jnp.take(table.top, block >> LOW_BITS, axis=0, mode="clip")
        angles = _sum(_sum(low, high), top)
    return angles[..., 0], angles[..., 1]


def dynamic_rope_angles(
    rope: RopeConfig,
    table: RopeTable,
    positions: Int32[Array, " T"],
    prompt_lens: Int32[Array, " T"],
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Return fp32 cos and sin for the dynamic kind, whose base grows with the sequence.

    `prompt_lens` holds, per token, the prompt length of its sequence. A token at position p counts
    as part of a sequence of max(prompt length, p + 1) tokens: every prompt token is rotated as in
    one forward pass over the whole prompt, however the prompt is cut into chunks, and a generated
    token as if it were the last one. Up to `rope.original_max_position` the exact table is used;
    beyond it angles are fp32 products, with an error of about position · 1e-7 radians.
    """
    lengths = jnp.maximum(prompt_lens, positions + 1)
    head_dim = 2 * table.low.shape[1]
    unscaled = inverse_frequencies(rope, head_dim)
    # base'^(-2j/d) = base^(-2j/d) · growth^(-2j/(d-2)); log1p keeps growth near 1 accurate.
    powers = np.arange(0, head_dim, 2) / (head_dim - 2)
    over = (lengths - rope.original_max_position).astype(jnp.float32)
    log_growth = jnp.log1p(jnp.maximum(over, 0.0) * (rope.factor / rope.original_max_position))
    shrink = jnp.exp(-log_growth[:, None] * jnp.asarray(powers, jnp.float32)[None, :])
    frequencies = shrink * jnp.asarray(unscaled, jnp.float32)[None, :]
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    table_cos, table_sin = rope_angles(table, positions)
    is_long = (over > 0.0)[:, None]
    cos = jnp.where(is_long, jnp.cos(angles), table_cos)
    return cos, jnp.where(is_long, jnp.sin(angles), table_sin)


def _sum(a: Float[Array, "T half 2"], b: Float[Array, "T half 2"]) -> Float[Array, "T half 2"]:
    """The sum of two angles, all as (cos, sin)."""
    cos, sin = a[..., 0], a[..., 1]
    cos_b, sin_b = b[..., 0], b[..., 1]
    return jnp.stack([cos * cos_b - sin * sin_b, sin * cos_b + cos * sin_b], axis=-1)


def _unit_circle(positions: np.ndarray, frequencies: np.ndarray) -> Float64[np.ndarray, "p half 2"]:
    angles = positions.astype(np.float64)[:, None] * frequencies[None, :]
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def _dynamic_growth(rope: RopeConfig, length: int) -> float:
    """NTK growth of the base: 1 up to the trained length, then linear in the length."""
    trained = rope.original_max_position
    return 1.0 + rope.factor * max(length - trained, 0) / trained


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Keep high frequencies, divide low ones by the factor, blend the band between (Llama 3.1)."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # in the trained context
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _yarn(rope: RopeConfig, frequencies: np.ndarray, head_dim: int) -> np.ndarray:
    """Ramp from kept to divided frequencies between two pair indices (arXiv 2309.00071, §3.2)."""
    low = _yarn_pair_index(rope, rope.beta_fast, head_dim)
    high = _yarn_pair_index(rope, rope.beta_slow, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper limit is head_dim - 1, not the last pair: published checkpoints rely on it.
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    divided = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return (1 - divided) * frequencies + divided * frequencies / rope.factor


def _yarn_pair_index(rope: RopeConfig, turns: float, head_dim: int) -> float:
    """Index (fractional) of the pair that makes so many turns in the trained context."""
    ratio = rope.original_max_position / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(rope.theta))


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
