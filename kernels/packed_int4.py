"""The layout of 4-bit weights: eight to a 32-bit word, so that a kernel unpacks without shuffling.

A matrix of N outputs and K inputs is [N, 16 * blocks] words, one block for 128 inputs. Nibble j
(bits 4j to 4j+3) of word 16b+r belongs to input 128b + 16j + r: equal nibbles of 16 neighbouring
words are 16 neighbouring inputs. The last block is padded; padding means nothing and is cut off.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

BLOCK = 128  # inputs
WORDS = 16  # per block
NIBBLES = 8  # per word


def words_per_row(num_inputs: int) -> int:
    """Words that hold one output's weights."""
    return -(-num_inputs // BLOCK) * WORDS


def pack(codes: UInt8[np.ndarray, "N K"]) -> Int32[np.ndarray, "N words"]:
    """Pack codes of 0 to 15 on the host."""
    num_outputs, num_inputs = codes.shape
    words = words_per_row(num_inputs)
    padded = np.zeros((num_outputs, words * NIBBLES), np.uint8)
    padded[:, :num_inputs] = codes
    planes = padded.reshape(num_outputs, -1, NIBBLES, WORDS)
    packed = np.zeros((num_outputs, planes.shape[1], WORDS), np.uint32)
    for j in range(NIBBLES):
        packed |= planes[:, :, j].astype(np.uint32) << np.uint32(4 * j)
    return packed.reshape(num_outputs, words).view(np.int32)


def unpack(packed: Int32[Array, "N words"], num_inputs: int) -> Int32[Array, "N K"]:
    """Give the codes back, 0 to 15."""
    blocks = packed.reshape(packed.shape[0], -1, 1, WORDS)
    shifts = jnp.arange(0, 4 * NIBBLES, 4, dtype=jnp.int32)[None, None, :, None]
    blocks, shifts = jnp.broadcast_arrays(blocks, shifts)
    codes = lax.shift_right_logical(blocks, shifts) & jnp.int32(15)
    return codes.reshape(packed.shape[0], -1)[:, :num_inputs]


def dequantize(
    packed: Int32[Array, "N words"],
    scale: Float[Array, "G N"],
    zero: UInt8[Array, "G N"],
    *,
    num_inputs: int,
    group_size: int,
) -> Float[Array, "N K"]:
    """scale * (code - zero), float32; inputs g * group_size and on share row g of both."""
    codes = unpack(packed, num_inputs)

    def per_input(x: Array) -> Array:
        return jnp.repeat(x.T, group_size, axis=1)[:, :num_inputs]

    return (codes - per_input(zero.astype(jnp.int32))).astype(jnp.float32) * per_input(scale)
