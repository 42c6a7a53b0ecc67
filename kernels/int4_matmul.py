"""Products with 4-bit weights in Triton: unpacked in registers, a scale per group of inputs.

A step takes one word of 16 neighbouring ones per output, which are 128 inputs in eight planes of
16, and multiplies plane by plane: nothing is shuffled. Scales and zero points are loaded one step
ahead, because Triton does not overlap loads that no product waits for. Layout: `packed_int4.py`.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32, UInt8

from swiftjax.kernels import _triton
from swiftjax.kernels.packed_int4 import BLOCK, NIBBLES, WORDS
from swiftjax.kernels.paged_tile import Ref
from swiftjax.kernels.split_k import (
    MatmulTile,
    add_parts,
    block_range,
    choose_splits,
    choose_tile,
    load_tile,
    output_of,
    product,
    spread,
    store_part,
)


def int4_tiles(
    x: Float[Array, "T K"],
    kernel: Int32[Array, "N words"],
    scale: Float32[Array, "G N"],
    zero: UInt8[Array, "G N"],
    *,
    group_size: int,
    tile: MatmulTile | None = None,
) -> Float[Array, "T N"]:
    """Run the Triton implementation; benchmarks pass a tile."""
    num_outputs = kernel.shape[0]
    tile = tile or choose_int4_tile(x.shape[0], num_outputs, x.shape[1])
    (parts,) = _triton.launch(
        partial(_kernel, tile=tile, group_size=group_size),
        [x, kernel, scale, zero],
        [output_of(x, num_outputs, x.dtype, tile.splits)],
        name="int4_matmul",
        grid=tile.grid(x.shape[0], num_outputs),
        knobs=tile.launch,
    )
    return add_parts(parts, x.dtype)


def choose_int4_tile(num_tokens: int, num_outputs: int, num_inputs: int) -> MatmulTile:
    """Pick a tile: for few tokens more programs, up to 16 smaller ones; each waits at all steps."""
    tile = choose_tile(num_tokens, num_outputs, num_inputs, transposed=True)
    if tile.block_m > 32:
        return tile
    # A step of 8B parameters took 3.00 ms before for one row and 2.63 so, 4.38 and 4.30 for 32.
    block_n, num_warps, per_core = (64, 2, 8) if tile.block_m == 16 else (128, 4, 4)
    programs = -(-num_tokens // tile.block_m) * -(-num_outputs // block_n)
    return replace(
        tile,
        block_n=block_n,
        splits=choose_splits(programs, -(-num_inputs // BLOCK), per_core),
        transposed=False,
        launch=replace(tile.launch, num_warps=num_warps),
    )


def _kernel(
    x_ref: Ref,  # [T K]
    kernel_ref: Ref,  # [N words]
    scale_ref: Ref,  # [G N]
    zero_ref: Ref,
    out_ref: Ref,  # [S T N]
    *,
    tile: MatmulTile,
    group_size: int,
) -> None:
    """Grid (tokens / block_m, outputs / block_n, parts)."""
    rows = block_range(pl.program_id(0), tile.block_m)
    columns = block_range(pl.program_id(1), tile.block_n)
    steps = kernel_ref.shape[1] // WORDS
    share = -(-steps // tile.splits)
    first = pl.program_id(2) * share
    groups = BLOCK // group_size  # per step
    planes = group_size // WORDS  # per group
    is_ragged = x_ref.shape[1] % BLOCK != 0

    def group_params(step: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
        # Past the last group, of padding or of the step after the last: any finite value will do.
        last = scale_ref.shape[0] - 1
        at = [(jnp.minimum(step * groups + i, last), columns) for i in range(groups)]
        load = partial(_triton.load, mask=columns < scale_ref.shape[1], other=0)
        return tuple((load(scale_ref.at[i]), load(zero_ref.at[i])) for i in at)

    def step(i: jax.Array, carry: tuple) -> tuple:
        total, params = carry
        following = group_params(i + 1)
        words = load_tile(kernel_ref, columns, block_range(i, WORDS), mask_columns=False)
        for group, (scale, zero) in enumerate(params):
            sums = jnp.zeros_like(total)
            mine = range(group * planes, (group + 1) * planes)
            for j, weights in zip(mine, _unpacked(words, zero, mine, x_ref.dtype), strict=True):
                inputs = i * BLOCK + block_range(j, WORDS)
                values = load_tile(x_ref, rows, inputs, mask_columns=is_ragged)
                sums += product(weights, values, transposed=tile.transposed)
            factor = spread(scale, over_outputs=True, transposed=tile.transposed)
            total += sums * factor
        return total, following

    shape = (tile.block_n, tile.block_m) if tile.transposed else (tile.block_m, tile.block_n)
    carry = (jnp.zeros(shape, jnp.float32), group_params(first))
    total, _ = lax.fori_loop(first, jnp.minimum(first + share, steps), step, carry)
    store_part(out_ref, pl.program_id(2), total, rows, columns, transposed=tile.transposed)


def _unpacked(
    words: Int32[Array, "N 16"], zero: UInt8[Array, " N"], planes: range, dtype: jnp.dtype
) -> list[Float[Array, "N 16"]]:
    """code - zero point of some of the eight planes of a tile of words."""
    zeros = jnp.broadcast_to(zero.astype(jnp.float32).astype(dtype)[:, None], words.shape)
    if dtype == jnp.float32 or _triton.is_interpreted():
        shifted = (lax.shift_right_logical(words, jnp.int32(4 * j)) for j in planes)
        return [(x & jnp.int32(15)).astype(dtype) - zeros for x in shifted]
    return [_triton.unpack_nibble(words, zeros, j) for j in planes]


assert BLOCK == NIBBLES * WORDS
