"""What the kernels of quantised products share: tiles, the split of the sum, the store.

A program owns a tile of tokens and outputs and one part of the inputs. With one part it writes
the result; with more, float32 partial sums that XLA adds up. The product may be computed
transposed: weights then stand where tensor cores take 64 rows, few tokens where 8 or 16 do.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import _triton
from swiftjax.kernels._fp8_product import fp8_product
from swiftjax.kernels.paged_tile import Ref, pl_range
from swiftjax.kernels.quantized_reference import FP8

NUM_CORES = 132  # of an H200; other cards get about as good a split
BLOCK_N, BLOCK_K = 128, 128  # outputs and inputs of a tile
# Tokens of a tile from which on a Hopper GPU multiplies e4m3 by its own instruction, not float16's:
# 36 us in place of 47 for 64 tokens, and no difference for 16.
FP8_AS_SUCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulTile:
    """Tokens, outputs and inputs of a tile, parts of the sum, and how the program runs."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    transposed: bool
    launch: _triton.Launch

    def grid(self, num_tokens: int, num_outputs: int) -> tuple[int, int, int]:
        """Programs: tiles of tokens (neighbours share weights), tiles of outputs, parts."""
        return (-(-num_tokens // self.block_m), -(-num_outputs // self.block_n), self.splits)


def choose_splits(programs: int, steps: int, per_core: int = 2) -> int:
    """Parts of the sum: so many programs a core if that leaves four steps or more to each."""
    splits = 1
    while programs * splits * 2 <= NUM_CORES * per_core and steps >= 8 * splits:
        splits *= 2
    return splits


def choose_tile(
    num_tokens: int, num_outputs: int, num_inputs: int, *, transposed: bool
) -> MatmulTile:
    """Pick a tile for few tokens; `benchmarks/quantized_matmul.py --sweep` times the others."""
    block_m = min(64, max(16, _triton.power_of_two(num_tokens)))
    programs = -(-num_tokens // block_m) * -(-num_outputs // BLOCK_N)
    return MatmulTile(
        block_m=block_m,
        block_n=BLOCK_N,
        block_k=BLOCK_K,
        splits=choose_splits(programs, -(-num_inputs // BLOCK_K)),
        transposed=transposed,
        launch=_triton.Launch(num_warps=4, num_stages=3),
    )


def output_of(x: Array, num_outputs: int, dtype: jnp.dtype, splits: int) -> jax.ShapeDtypeStruct:
    """The array that a kernel fills: the result, or float32 partial sums."""
    shape = (splits, x.shape[0], num_outputs)
    return jax.ShapeDtypeStruct(shape, dtype if splits == 1 else jnp.float32)


def add_parts(parts: Float[Array, "S T N"], dtype: jnp.dtype) -> Float[Array, "T N"]:
    """Add up the parts of the sum."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(axis=0).astype(dtype)


def product(weights: Array, rows: Array, *, transposed: bool) -> Array:
    """Multiply [N K] weights with [M K] rows: [M N], or transposed [N M]; float32 or int32."""
    wide = jnp.int32 if rows.dtype == jnp.int8 else jnp.float32
    left, right = (weights, rows) if transposed else (rows, weights)
    if rows.dtype == FP8 and rows.shape[0] >= FP8_AS_SUCH:
        return fp8_product(left, right.T)
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jnp.dot(left, right.T, preferred_element_type=wide, precision=precision)


def spread(vector: Array, *, over_outputs: bool, transposed: bool) -> Array:
    """Give a vector over outputs or tokens the axis that it lacks in a product."""
    return vector[:, None] if over_outputs == transposed else vector[None, :]


def store_part(
    out_ref: Ref,  # [S T N]
    part: Any,
    values: Array,
    rows: Int32[Array, " M"],
    columns: Int32[Array, " N"],
    *,
    transposed: bool,
) -> None:
    """Store a tile into one part."""
    token = spread(rows, over_outputs=False, transposed=transposed)
    output = spread(columns, over_outputs=True, transposed=transposed)
    mask = jnp.broadcast_to((token < out_ref.shape[1]) & (output < out_ref.shape[2]), values.shape)
    _triton.store(out_ref.at[part, token, output], values.astype(out_ref.dtype), mask=mask)


def load_tile(
    ref: Ref, rows: Int32[Array, " R"], columns: Int32[Array, " C"], *, mask_columns: bool
) -> Array:
    """Load a tile of a matrix; rows past the end, and columns if asked, are zero."""
    at = ref.at[rows[:, None], columns[None, :]]
    mask = (rows < ref.shape[0])[:, None]
    if mask_columns:
        mask = mask & (columns < ref.shape[1])[None, :]
    other = jnp.zeros((), ref.dtype)
    return _triton.load(at, mask=jnp.broadcast_to(mask, (rows.size, columns.size)), other=other)


def block_range(index: Any, size: int) -> Int32[Array, " size"]:
    """The indices of one block."""
    return index * size + pl_range(size)
