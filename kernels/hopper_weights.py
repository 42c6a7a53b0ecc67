"""Weights of 4 bits in a warpgroup's registers: from packed words to what tensor cores multiply.

A word of 32 bits holds numbers of 8 inputs, plane by plane: plane j of 16 neighbouring words are
the 16 inputs of one instruction, so nothing moves between threads. A number is masked out where it
stands, under the exponent of a float32 whose last bit is then one: no conversion, few shifts, and
a subtraction takes the exponent off again. Knows no memory and no barriers.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from swiftjax.kernels import _mosaic_registers

WORDS = 16  # of a row, that are unpacked together
INPUTS = 64  # of a row, that are multiplied together
PLANES = INPUTS // WORDS
STEP = 8 * WORDS  # inputs in the 16 words of a row
PARTS = STEP // INPUTS  # pieces of a step, each multiplied at once
MANTISSA = 23  # bits of a float32 under its exponent


def float_exponents() -> list[int]:
    """For every plane the bits under which its numbers are put."""
    bits = [4 * plane - _shift(plane) for plane in range(STEP // WORDS)]
    return [(127 + MANTISSA - bit) << MANTISSA for bit in bits]


def unpack(
    words: jax.Array,
    scales: Sequence[jax.Array],
    zeros: Sequence[jax.Array],
    part: int,
    exponents: Sequence[jax.Array],
    dtype: jnp.dtype,
) -> jax.Array:
    """Unpack 64 inputs of words [R 16]: [R 64].

    `scales` and `zeros` [R] are those of the groups of a step, float32.
    """
    group_size = STEP // len(scales)
    planes = []
    for plane in range(part * PLANES, (part + 1) * PLANES):
        bit = 4 * plane - _shift(plane)
        shifted = lax.shift_right_logical(words, jnp.int32(_shift(plane)))
        kept = shifted & jnp.int32(15 << bit)
        number = lax.bitcast_convert_type(kept | exponents[plane], jnp.float32)
        group = plane * WORDS // group_size
        number = number - _over_columns(zeros[group] + float(1 << (MANTISSA - bit)))
        number = number * _over_columns(scales[group])
        planes.append(number.astype(dtype))
    return _mosaic_registers.join(planes)


def unpack_unscaled(
    words: jax.Array, zero: jax.Array, part: int, exponents: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Unpack 64 inputs of words [R 16]: [R 64], less `shifted_zero` of their group."""
    planes = range(part * PLANES, (part + 1) * PLANES)
    numbers = [_mosaic_registers.nibbles(words, 4 * plane, exponents, dtype) for plane in planes]
    return _mosaic_registers.join([number - _over_columns(zero) for number in numbers])


def half_exponents(dtype: jnp.dtype) -> int:
    """Twice the bits of a power of two of 16 bits, whose last bit is one."""
    bits = int(np.asarray(_one_apart(dtype), dtype).view(np.uint16))
    return bits | bits << 16


def shifted_zero(zero: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What is taken off numbers under such an exponent."""
    return (zero.astype(jnp.float32) + _one_apart(dtype)).astype(dtype)


def _shift(plane: int) -> int:
    """How far a plane that would reach into the exponent is shifted down."""
    return 12 if 4 * (plane + 1) > MANTISSA else 0


def _one_apart(dtype: jnp.dtype) -> float:
    return float(1 << jnp.finfo(dtype).nmant)


def _over_columns(x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, (x.shape[0], WORDS), [0])
