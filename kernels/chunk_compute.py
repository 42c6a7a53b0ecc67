"""The computing warpgroups of `chunk_attention.py`: scores, softmax, sums and where they go.

The two change places at the tensor cores: while one multiplies, the other computes its softmax.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from swiftjax.kernels import _mosaic, _mosaic_products
from swiftjax.kernels.chunk_work import (
    BLOCK_K,
    NUM_STAGES,
    ROWS,
    Arguments,
    Chunks,
    Ref,
    Shared,
    Work,
    is_seen,
)

# The score of a key that a row must not see, and the highest of a row that saw none yet. Not -inf,
# whose difference to itself is no number; and not of one size: multiplied and subtracted by one
# instruction, equal numbers differ by what the product's rounding took, and 2 to the power of 1e21
# is inf.
UNSEEN, LOWEST = -3e38, -1e30
LOG2_E = 1.4426950408889634


def compute(arguments: Arguments, shared: Shared, work: Work, done: Any, chunks: Chunks) -> None:
    """Attend for the rows of one warpgroup."""
    warpgroup = lax.axis_index("warpgroup")
    head_dim = arguments.q.shape[2]
    row = work.start + warpgroup * ROWS
    q = shared.q.at[warpgroup]
    _mosaic.copy_in(arguments.q.at[pl.ds(row, ROWS), work.head], q, shared.q_is_there.at[warpgroup])
    _mosaic.wait(shared.q_is_there.at[warpgroup])
    state = (
        _mosaic.matrix(jnp.zeros((ROWS, head_dim), jnp.float32)),
        _mosaic.column(jnp.full((ROWS,), LOWEST, jnp.float32)),
        _mosaic.column(jnp.zeros((ROWS,), jnp.float32)),
    )
    # The second one begins when the first has its first scores.
    pl.when(warpgroup == 1)(lambda: _change_places(shared))
    trip = partial(_trip, shared, work, done, chunks)
    state = lax.fori_loop(work.begin, work.masked, partial(trip, False), state)
    sums, _, weights = lax.fori_loop(work.masked, work.end, partial(trip, True), state)
    pl.when(warpgroup == 0)(lambda: _change_places(shared))
    weights = jnp.where(weights == 0.0, 1.0, weights)  # rows that see nothing are zeros
    out = (sums / _over_columns(weights, head_dim)).astype(arguments.q.dtype)
    _store(arguments, shared, work, row, out)


def _trip(
    shared: Shared, work: Work, done: Any, chunks: Chunks, is_masked: bool, trip: Any, state: Any
) -> Any:
    """Take in the keys of one trip; the state is (sums, highest scores, sums of weights)."""
    warpgroup = lax.axis_index("warpgroup")
    sums, highest, weights = state
    stage = lax.rem(done + trip - work.begin, jnp.int32(NUM_STAGES))
    _mosaic.wait(shared.keys_are_there.at[stage])
    scores = _mosaic_products.product(
        shared.q.at[warpgroup], shared.keys.at[stage], lambda: _change_places(shared)
    )
    _mosaic.arrive(shared.keys_are_free.at[stage])
    if is_masked:
        scores = jnp.where(is_seen(work, trip, chunks), scores, UNSEEN)
    # Scaled where that and the difference become one instruction.
    scale = chunks.scale * LOG2_E
    before, highest = highest, jnp.maximum(highest, scores.max(axis=1) * scale)
    weight = jnp.exp2(scores * scale - _over_columns(highest, BLOCK_K))
    shrunk = jnp.exp2(before - highest)
    sums = sums * _over_columns(shrunk, sums.shape[1])
    weights = weights * shrunk + weight.sum(axis=1)
    # All of that before the other warpgroup gives the tensor cores back.
    sums, highest, weights, weight = lax.optimization_barrier(
        (sums, highest, weights, weight.astype(shared.values.dtype))
    )
    _mosaic.arrive(shared.turn)
    _mosaic.wait(shared.values_are_there.at[stage])
    if is_masked:
        pl.when(trip == work.end - 1)(lambda: _clear_behind(shared.values.at[stage], work, trip))
    _mosaic.wait(shared.turn)
    sums = _mosaic_products.add_product(sums, weight, shared.values.at[stage])
    _mosaic.arrive(shared.values_are_free.at[stage])
    return sums, highest, weights


def _clear_behind(values: Ref, work: Work, trip: Any) -> None:
    """Zero what lies behind the newest token: it may be NaN, which no weight of zero silences.

    Both warpgroups do it, each before its own product.
    """
    size = values.shape[1]
    for first in range(0, BLOCK_K, ROWS):
        part = pl.ds(first, ROWS)
        position = _mosaic.numbers((ROWS, size), 0) + (trip * BLOCK_K + first)
        found = _mosaic.matrix(values[part])
        values[part] = jnp.where(position <= work.newest, found, jnp.zeros_like(found))
    _mosaic.commit()


def _store(arguments: Arguments, shared: Shared, work: Work, row: Any, out: jax.Array) -> None:
    """Write the rows of this warpgroup that belong to the block: all at once, or one by one."""
    warpgroup = lax.axis_index("warpgroup")
    first, end = work.tokens
    low, high = jnp.maximum(first - row, 0), jnp.minimum(end - row, ROWS)
    is_whole = (low == 0) & (high == ROWS)

    @pl.when(is_whole)
    def _() -> None:
        staged = shared.q.at[warpgroup]
        staged[...] = out
        _mosaic.commit()
        _mosaic.copy_out(staged, arguments.out.at[pl.ds(row, ROWS), work.head])

    @pl.when(jnp.logical_not(is_whole))
    def _() -> None:
        staged = shared.rows.at[warpgroup]
        staged[...] = out
        _mosaic.commit()
        pl.loop(low, jnp.maximum(low, high))(
            lambda i: _mosaic.copy_out(staged.at[i], arguments.out.at[row + i, work.head])
        )

    _mosaic.wait_copies_out(0)


def _change_places(shared: Shared) -> None:
    _mosaic.arrive(shared.turn)
    _mosaic.wait(shared.turn)


def _over_columns(x: jax.Array, size: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (x.shape[0], size), [0])
