"""Products with 8-bit weights in Triton: int8 weights alone, int8 with int8, e4m3 with e4m3.

One kernel for all three: weights are cast to the type of the rows where they differ, and the scales
are applied to the finished sum. Fast for few tokens, where reading the weights is all the time.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Num

from swiftjax.kernels import _triton
from swiftjax.kernels.paged_tile import Ref
from swiftjax.kernels.split_k import (
    MatmulTile,
    add_parts,
    block_range,
    choose_tile,
    load_tile,
    output_of,
    product,
    spread,
    store_part,
)


def narrow_matmul(
    x: Num[Array, "T K"],
    kernel: Num[Array, "N K"],
    scale: Float32[Array, " N"],
    row_scale: Float32[Array, " T"] | None,
    *,
    dtype: jnp.dtype,
    tile: MatmulTile | None = None,
) -> Float[Array, "T N"]:
    """(x @ kernel.T) * scale * row_scale in `dtype`; benchmarks pass a tile."""
    num_outputs, num_inputs = kernel.shape
    # Products of 8 bits by 8 have their own instructions only where the weights stand first.
    is_narrow = x.dtype.itemsize == 1
    tile = tile or choose_tile(x.shape[0], num_outputs, num_inputs, transposed=is_narrow)
    scales = [scale] if row_scale is None else [scale, row_scale]
    (parts,) = _triton.launch(
        partial(_kernel, tile=tile),
        [x, kernel, *scales],
        [output_of(x, num_outputs, dtype, tile.splits)],
        name="narrow_matmul",
        grid=tile.grid(x.shape[0], num_outputs),
        knobs=tile.launch,
    )
    return add_parts(parts, dtype)


def _kernel(x_ref: Ref, kernel_ref: Ref, scale_ref: Ref, *refs: Ref, tile: MatmulTile) -> None:
    """Grid (tokens / block_m, outputs / block_n, parts)."""
    *row_scale_refs, out_ref = refs
    num_inputs = kernel_ref.shape[1]
    rows = block_range(pl.program_id(0), tile.block_m)
    columns = block_range(pl.program_id(1), tile.block_n)
    steps = -(-num_inputs // tile.block_k)
    share = -(-steps // tile.splits)
    first = pl.program_id(2) * share
    is_ragged = num_inputs % tile.block_k != 0

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        inputs = block_range(i, tile.block_k)
        weights = load_tile(kernel_ref, columns, inputs, mask_columns=is_ragged)
        values = load_tile(x_ref, rows, inputs, mask_columns=is_ragged)
        if weights.dtype != values.dtype:
            weights = weights.astype(values.dtype)
        return total + product(weights, values, transposed=tile.transposed)

    shape = (tile.block_n, tile.block_m) if tile.transposed else (tile.block_m, tile.block_n)
    zeros = jnp.zeros(shape, jnp.int32 if x_ref.dtype == jnp.int8 else jnp.float32)
    total = lax.fori_loop(first, jnp.minimum(first + share, steps), step, zeros)
    scale = _triton.load(scale_ref.at[columns], mask=columns < scale_ref.shape[0], other=0)
    total = total.astype(jnp.float32) * spread(scale, over_outputs=True, transposed=tile.transposed)
    for ref in row_scale_refs:
        scale = _triton.load(ref.at[rows], mask=rows < ref.shape[0], other=0)
        total = total * spread(scale, over_outputs=False, transposed=tile.transposed)
    store_part(out_ref, pl.program_id(2), total, rows, columns, transposed=tile.transposed)
