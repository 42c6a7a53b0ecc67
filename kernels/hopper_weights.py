"""Packed weights in a warpgroup's registers: from 32-bit words to what tensor cores multiply.

A word holds numbers of several inputs, plane by plane: plane j of 16 neighbouring words are the 16
inputs of one instruction, so nothing moves between threads. A number is masked out where it
stands, under the exponent of a float32 whose last bit is then one: no conversion, few shifts, and
a subtraction takes the exponent off again. Knows no memory and no barriers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from swiftjax.kernels import _mosaic_registers

WORDS = 16  # of a row, that are unpacked together
INPUTS = 64  # of a row, that are multiplied together
PLANES = INPUTS // WORDS
MANTISSA = 23  # bits of a float32 under its exponent


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How weights lie in words."""

    bits: int  # 4, from 0 on; or 8, with a sign
    group_size: int = 0  # inputs with a scale and a zero point; 0: none is applied here

    @property
    def step(self) -> int:
        """Inputs in the 16 words of a row."""
        return WORDS * 32 // self.bits

    @property
    def parts(self) -> int:
        """Pieces of a step that are multiplied together."""
        return self.step // INPUTS

    @property
    def groups(self) -> int:
        """Groups in a step."""
        return self.step // self.group_size if self.group_size else 0

    def shift(self, plane: int) -> int:
        """How far a plane that would reach into the exponent is shifted down."""
        reaches = (plane + 1) * self.bits > MANTISSA
        return (12 if self.bits == 4 else 16) if reaches else 0

    def exponents(self) -> list[int]:
        """For every plane the bits under which its numbers are put."""
        found = []
        for plane in range(self.step // WORDS):
            bit = plane * self.bits - self.shift(plane)
            exponent = (127 + MANTISSA - bit) << MANTISSA
            # With its sign turned, a number in two's complement is 128 more.
            found.append(exponent | (128 << bit if self.bits == 8 else 0))
        return found


def unpack(
    packing: Packing,
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
    planes = []
    for plane in range(part * PLANES, (part + 1) * PLANES):
        bit = plane * packing.bits - packing.shift(plane)
        shifted = lax.shift_right_logical(words, jnp.int32(packing.shift(plane)))
        kept = shifted & jnp.int32(((1 << packing.bits) - 1) << bit)
        whole = kept ^ exponents[plane] if packing.bits == 8 else kept | exponents[plane]
        number = lax.bitcast_convert_type(whole, jnp.float32)
        zero = float(1 << (MANTISSA - bit)) + (128 if packing.bits == 8 else 0)
        if packing.groups:
            group = plane * WORDS // packing.group_size
            number = number - _over_columns(zeros[group] + zero)
            number = number * _over_columns(scales[group])
        else:
            number = number - zero
        planes.append(number.astype(dtype))
    return _mosaic_registers.join(planes)


def unpack_unscaled(
    words: jax.Array, zero: jax.Array, part: int, exponents: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Unpack 64 inputs of words [R 16] of 4 bits: [R 64], less `shifted_zero` of their group."""
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


def _one_apart(dtype: jnp.dtype) -> float:
    return float(1 << jnp.finfo(dtype).nmant)


def _over_columns(x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, (x.shape[0], WORDS), [0])
