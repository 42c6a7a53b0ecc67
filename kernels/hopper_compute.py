"""The computing warpgroups of `hopper_matmul.py`: unpack, multiply, and store what came of it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from swiftjax.kernels import _mosaic, _mosaic_products
from swiftjax.kernels.hopper_weights import PARTS, shifted_zero, unpack, unpack_unscaled
from swiftjax.kernels.hopper_work import BLOCK, HopperTile, Program, Work


def compute(program: Program, exponents: list[jax.Array], work: Work, done: Any) -> None:
    """Multiply the rows of one warpgroup and store them."""
    add_up = _add_up_unscaled if program.tile.scales_late else _add_up
    _store(program, work, add_up(program, exponents, work, done))


def _add_up(program: Program, exponents: list[jax.Array], work: Work, done: Any) -> jax.Array:
    """Multiply weights that have their scales, without waiting between steps."""
    arguments, shared, _, tile = program
    num_pieces = jnp.int32(shared.x.shape[0])
    # A product reads its weights from registers until it is done, and one is still at work when
    # the next weights are unpacked. Each product of a step has registers of its own, but the same
    # ones in every step: were there one product to a step, they would be overwritten under it.
    assert PARTS * tile.blocks >= 2

    def step(number: Any, add: _mosaic_products.Add) -> None:
        trip = done + number - work.begin
        stage = lax.rem(trip, jnp.int32(shared.words.shape[0]))
        _mosaic.wait(shared.words_are_there.at[stage])
        blocks = [_load_block(program, stage, i) for i in range(tile.blocks)]
        for part in range(PARTS):
            piece = trip * PARTS + part
            stage_of_x = lax.rem(piece, num_pieces)
            before = lax.rem(piece + num_pieces - 1, num_pieces)
            is_first = (number == work.begin) & (part == 0)
            for i, block in enumerate(blocks):
                weights = unpack(*block, part, exponents, arguments.x.dtype)
                if i == 0:
                    _mosaic.wait(shared.x_is_there.at[stage_of_x])
                add(i * BLOCK, weights, shared.x.at[stage_of_x])
                # All products before are done when only this one is not.
                _mosaic_products.wait_products(1)
                if i == 0:
                    pl.when(jnp.logical_not(is_first))(
                        partial(_mosaic.arrive, shared.x_is_free.at[before])
                    )
        _mosaic.arrive(shared.words_are_free.at[stage])

    sums = _mosaic_products.add_up_trips((tile.rows, tile.tokens), work.begin, work.end, step)
    last = (done + work.num_steps) * PARTS - 1
    _mosaic.arrive(shared.x_is_free.at[lax.rem(last, num_pieces)])
    return sums


def _add_up_unscaled(
    program: Program, exponents: list[jax.Array], work: Work, done: Any
) -> jax.Array:
    """Multiply whole numbers group by group, and scale the sums of each."""
    arguments, shared, groups, tile = program
    shape, dtype = (tile.rows, tile.tokens), arguments.x.dtype
    parts = PARTS // groups  # of a group

    def step(number: Any, total: jax.Array) -> jax.Array:
        trip = done + number - work.begin
        stage = lax.rem(trip, jnp.int32(shared.words.shape[0]))
        _mosaic.wait(shared.words_are_there.at[stage])
        blocks = [_load_block(program, stage, i) for i in range(tile.blocks)]
        for group in range(groups):
            first = trip * PARTS + group * parts
            stages = [lax.rem(first + i, jnp.int32(shared.x.shape[0])) for i in range(parts)]

            def multiply(
                add: _mosaic_products.Add, group: int = group, stages: list = stages
            ) -> None:
                for i, at in enumerate(stages):
                    _mosaic.wait(shared.x_is_there.at[at])
                    for j, (words, _, zeros) in enumerate(blocks):
                        zero = shifted_zero(zeros[group], dtype)
                        part = group * parts + i
                        weights = unpack_unscaled(words, zero, part, exponents[0], dtype)
                        add(j * BLOCK, weights, shared.x.at[at])
                        _mosaic_products.wait_products(1)

            # Waits for all products of the group, and within it each has registers of its own:
            # none are overwritten while they are read, as they could be in `_add_up`.
            sums = _mosaic_products.add_up(shape, multiply)
            for at in stages:
                _mosaic.arrive(shared.x_is_free.at[at])
            mine = pl.ds(lax.axis_index("warpgroup") * tile.rows, tile.rows)
            factor = _mosaic.load_column(shared.scale.at[stage, group, mine])
            total = total + sums * lax.broadcast_in_dim(factor, shape, [0])
        _mosaic.arrive(shared.words_are_free.at[stage])
        return total

    zeros = _mosaic.matrix(jnp.zeros(shape, jnp.float32))
    return lax.fori_loop(work.begin, work.end, step, zeros)


def _load_block(
    program: Program, stage: Any, block: int
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """Words, scales and zero points of a step, for one of a warpgroup's blocks of rows."""
    _, shared, groups, tile = program
    rows = pl.ds(lax.axis_index("warpgroup") * tile.rows + block * BLOCK, BLOCK)
    words = _mosaic.matrix(shared.words[stage, rows])
    at = [(stage, group, rows) for group in range(groups)]
    scales = [_mosaic.load_column(shared.scale.at[i]) for i in at]
    zeros = [_mosaic.load_column(shared.zero.at[i]).astype(jnp.float32) for i in at]
    return words, scales, zeros


def _store(program: Program, work: Work, sums: jax.Array) -> None:
    """Write a warpgroup's rows of the transposed product, some tokens at a time."""
    out, shared, tile = program.arguments.out, program.shared, program.tile
    size = tile.stored
    others = 0 if size == tile.tokens else 1  # copies that may still read: of the other half
    for i, first in enumerate(range(0, tile.tokens, size)):
        stored = shared.stored.at[lax.axis_index("warpgroup"), i % 2]
        _mosaic.wait_copies_read(others)
        _mosaic.store_transposed(stored, sums[:, first : first + size].astype(out.dtype))
        _mosaic.commit()
        tokens = pl.ds(work.token + first, size)
        _mosaic.copy_out(stored, out.at[work.part, tokens, _rows_of(tile, work)])


def _rows_of(tile: HopperTile, work: Work) -> Any:
    return pl.ds(work.output + lax.axis_index("warpgroup") * tile.rows, tile.rows)
