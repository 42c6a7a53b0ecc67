"""The computing warpgroups of `dense_matmul.py`: multiply, do what follows, and store it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from swiftjax.kernels import _mosaic, _mosaic_products
from swiftjax.kernels.dense_work import ROWS, STORED, Program, Work
from swiftjax.kernels.paged_tile import LOG2_E


def compute(program: Program, work: Work, done: Any) -> None:
    """Multiply a warpgroup's tokens and store them; `done` pieces came before."""
    _store(program, work, _add_up(program, done))


def _add_up(program: Program, done: Any) -> jax.Array:
    plan, _, shared = program
    rows = pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)
    stages = jnp.int32(plan.tile.stages)

    def trip(number: Any, add: _mosaic_products.AddShared) -> None:
        stage = lax.rem(done + number, stages)
        _mosaic.wait(shared.are_there.at[stage])
        for part in range(plan.parts):
            first = part * (plan.tile.columns // plan.parts)
            add(first, shared.x.at[stage, rows], shared.kernel.at[stage, part])
        # All products before are done when only these are not.
        _mosaic_products.wait_products(plan.parts)
        before = lax.rem(done + number + stages - 1, stages)
        pl.when(number > 0)(partial(_mosaic.arrive, shared.are_free.at[before]))

    shape = (ROWS, plan.tile.columns)
    sums = _mosaic_products.add_up_shared(
        shape, program.num_pieces, trip, turned=plan.outputs_first
    )
    _mosaic.arrive(shared.are_free.at[lax.rem(done + program.num_pieces - 1, stages)])
    return sums


def _store(program: Program, work: Work, sums: jax.Array) -> None:
    """Write the result, some columns at a time: one half is computed while another is copied."""
    plan, arguments, shared = program
    dtype, width = arguments.out.dtype, plan.tile.columns // plan.parts
    rows = pl.ds(work.token + lax.axis_index("warpgroup") * ROWS, ROWS)
    starts = range(0, width, STORED)
    places = [(rows, pl.ds(work.column + first, STORED)) for first in starts]
    residuals: list[jax.Array] = []
    if arguments.residual is not None:  # read at once, as all of it takes as long as some
        residuals = [_mosaic.load_matrix(arguments.residual.at[at]) for at in places]
    for i, (first, at) in enumerate(zip(starts, places, strict=True)):
        part = _scaled(program, rows, at[1], sums[:, first : first + STORED])
        if plan.gated:
            of_ups = pl.ds(arguments.out.shape[1] + work.column + first, STORED)
            up = _scaled(program, rows, of_ups, sums[:, width + first : width + first + STORED])
            part = part * _sigmoid(part) * up
        if residuals:
            part = part + residuals[i].astype(jnp.float32)
        stored = shared.stored.at[lax.axis_index("warpgroup"), i % 2]
        _mosaic.wait_copies_read(1)
        stored[...] = part.astype(dtype)
        _mosaic.commit()
        _mosaic.copy_out(stored, arguments.out.at[at])


def _scaled(program: Program, rows: Any, columns: Any, sums: jax.Array) -> jax.Array:
    arguments = program.arguments
    if arguments.row_scale is None or arguments.scale is None:
        return sums
    row_scale = _mosaic.load_column(arguments.row_scale.at[rows])
    scale = _mosaic.load_row(arguments.scale.at[columns])
    scaled = sums * lax.broadcast_in_dim(row_scale, sums.shape, [0])
    return scaled * lax.broadcast_in_dim(scale, sums.shape, [1])


def _sigmoid(x: jax.Array) -> jax.Array:
    # The square of a reciprocal root: one instruction each, where a division takes ten.
    root = lax.rsqrt(1 + jnp.exp2(x * -LOG2_E))
    return root * root
