"""Products with weights of 4 and 8 bits on Hopper GPUs: another implementation, for many tokens.

Computes the transposed product: weights are the tensor cores' first operand, which may lie in
registers, so they are unpacked where they are multiplied, and tokens the second. A program is two
warpgroups that compute and one that loads; each of the two unpacks while the other multiplies.
There is one program on each multiprocessor, and it takes tiles until there are none left. Layouts
are those of `packed_int4.py` and `quantized_reference.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int8, Int32, UInt8

from swiftjax.kernels import _mosaic
from swiftjax.kernels.hopper_weights import INPUTS, WORDS, Packing, unpack
from swiftjax.kernels.hopper_work import (
    BLOCK,
    NUM_COMPUTING,
    Arguments,
    HopperTile,
    Ref,
    Shared,
    Work,
    choose_tile,
    count_work,
    take_work,
)
from swiftjax.kernels.split_k import add_parts, output_of

# Registers of a thread: what computing and loading warpgroups take from, and leave, each other.
FEWEST_TOKENS = 16  # an instruction's; fewer would be mostly padding
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40


def can_multiply(x: Float[Array, "T K"], num_outputs: int, group_size: int) -> bool:
    """Whether these kernels know such a product; a `group_size` of 0 stands for 8 bits."""
    packing = Packing(bits=4 if group_size else 8, group_size=group_size)
    is_narrow = x.dtype.itemsize == 2 and x.shape[0] >= FEWEST_TOKENS
    return is_narrow and choose_tile(packing, *x.shape, num_outputs) is not None


def hopper_int4(
    x: Float[Array, "T K"],
    kernel: Int32[Array, "N words"],
    scale: Float32[Array, "G N"],
    zero: UInt8[Array, "G N"],
    *,
    group_size: int,
    tile: HopperTile | None = None,
) -> Float[Array, "T N"]:
    """x @ weights.T for weights packed as `packed_int4` says; benchmarks pass a tile."""
    return _matmul(Packing(bits=4, group_size=group_size), x, kernel, [scale, zero], tile)


def hopper_int8(
    x: Float[Array, "T K"],
    kernel: Int8[Array, "N K"],
    scale: Float32[Array, " N"],
    *,
    tile: HopperTile | None = None,
) -> Float[Array, "T N"]:
    """x @ (kernel * scale).T; benchmarks pass a tile."""
    outputs, inputs = kernel.shape
    words = lax.bitcast_convert_type(kernel.reshape(outputs, inputs // 4, 4), jnp.int32)
    # Byte j of word r is input 4r + j: activations are put in the order of planes.
    planes = x.reshape(x.shape[0], inputs // INPUTS, WORDS, 4).swapaxes(2, 3)
    return _matmul(Packing(bits=8), planes.reshape(x.shape), words, [scale], tile)


def _matmul(
    packing: Packing,
    x: Float[Array, "T K"],
    words: Int32[Array, "N words"],
    scales: list[Array],
    tile: HopperTile | None,
) -> Float[Array, "T N"]:
    num_tokens, num_outputs = x.shape[0], words.shape[0]
    tile = tile or choose_tile(packing, *x.shape, num_outputs)
    assert tile is not None, "no tile fills this matrix: see `can_multiply`"
    x_stages, stages = tile.stages(packing)
    x = jnp.pad(x, ((0, -num_tokens % tile.tokens), (0, 0)))
    out = output_of(x, num_outputs, x.dtype, tile.splits)
    grouped = [array for array in scales if packing.groups]
    parts = _mosaic.launch(
        partial(_kernel, packing, tile),
        [jnp.asarray(packing.exponents(), jnp.int32), x, words, *scales],
        out,
        scratch=[
            _mosaic.tiles((x_stages, tile.tokens, INPUTS), x.dtype),
            _mosaic.words((stages, tile.outputs, WORDS)),
            _mosaic.tiles((NUM_COMPUTING, 2, tile.stored, tile.rows), out.dtype),
            _mosaic.Barrier(num_barriers=x_stages),
            _mosaic.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=x_stages),
            _mosaic.Barrier(num_arrivals=1 + len(grouped), num_barriers=stages),
            _mosaic.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=stages),
            *(
                _mosaic.lines((stages, packing.groups, tile.outputs), array.dtype)
                for array in grouped
            ),
        ],
        num_programs=min(_mosaic.num_multiprocessors(), count_work(tile, x.shape[0], num_outputs)),
        num_warpgroups=NUM_COMPUTING + 1,
    )
    return add_parts(parts, x.dtype)[:num_tokens]


def _kernel(packing: Packing, tile: HopperTile, *refs: Ref) -> None:
    if packing.groups:
        arguments, shared = Arguments(*refs[:6]), Shared(*refs[6:])
    else:
        arguments, shared = Arguments(*refs[:4], None, refs[4]), Shared(*refs[5:])
    warpgroup = lax.axis_index("warpgroup")
    program, programs = lax.axis_index("program"), jnp.int32(lax.axis_size("program"))
    num_work = jnp.int32(count_work(tile, *arguments.out.shape[1:]))

    def take_turns(run: Callable[[Work, Any], None]) -> Any:
        def turn(index: Any, done: Any) -> Any:
            work = take_work(arguments, packing, tile, program + index * programs)
            run(work, done)
            return done + work.num_steps

        return lax.fori_loop(0, pl.cdiv(num_work - program, programs), turn, jnp.int32(0))

    @pl.when(warpgroup < NUM_COMPUTING)
    def _() -> None:
        _mosaic.set_max_registers(COMPUTE_REGISTERS, action="increase")
        exponents = [arguments.exponents[i] for i in range(arguments.exponents.shape[0])]
        take_turns(partial(_compute, arguments, shared, packing, tile, exponents))
        _mosaic.wait_copies_read(0)

    @pl.when(warpgroup == NUM_COMPUTING)
    def _() -> None:
        _mosaic.set_max_registers(LOAD_REGISTERS, action="decrease")
        done = take_turns(partial(_load, arguments, shared, packing, tile))
        # Nobody leaves before all is read.
        for is_free, stages, count in (
            (shared.words_are_free, shared.words.shape[0], done),
            (shared.x_is_free, shared.x.shape[0], done * packing.parts),
        ):
            pl.loop(jnp.maximum(count - stages, 0), count)(
                lambda i, f=is_free, s=stages: _mosaic.wait(f.at[lax.rem(i, jnp.int32(s))])
            )


def _load(
    arguments: Arguments, shared: Shared, packing: Packing, tile: HopperTile, work: Work, done: Any
) -> None:
    """Copy weights, scales and tokens of all steps, as soon as there is room."""
    outputs, tokens = pl.ds(work.output, tile.outputs), pl.ds(work.token, tile.tokens)

    @pl.loop(work.begin, work.end)
    def _(step: Any) -> None:
        trip = done + step - work.begin
        stage = lax.rem(trip, jnp.int32(shared.words.shape[0]))
        is_free, is_there = shared.words_are_free.at[stage], shared.words_are_there.at[stage]
        pl.when(trip >= shared.words.shape[0])(lambda: _mosaic.wait(is_free))
        words = arguments.words.at[outputs, pl.ds(step * WORDS, WORDS)]
        _mosaic.copy_in(words, shared.words.at[stage], is_there)
        if arguments.zero is not None and shared.scale is not None and shared.zero is not None:
            groups = pl.ds(step * packing.groups, packing.groups)
            for source, target in (
                (arguments.scale, shared.scale),
                (arguments.zero, shared.zero),
            ):
                _mosaic.copy_in(source.at[groups, outputs], target.at[stage], is_there)
        for part in range(packing.parts):
            number = trip * packing.parts + part
            stage = lax.rem(number, jnp.int32(shared.x.shape[0]))
            is_free = shared.x_is_free.at[stage]
            pl.when(number >= shared.x.shape[0])(partial(_mosaic.wait, is_free))
            inputs = pl.ds((step * packing.parts + part) * INPUTS, INPUTS)
            x = arguments.x.at[tokens, inputs]
            _mosaic.copy_in(x, shared.x.at[stage], shared.x_is_there.at[stage])


def _compute(
    arguments: Arguments,
    shared: Shared,
    packing: Packing,
    tile: HopperTile,
    exponents: list[jax.Array],
    work: Work,
    done: Any,
) -> None:
    """Multiply the rows of one warpgroup and store them."""

    def step(number: Any, add: Callable[[int, jax.Array, Ref], None]) -> None:
        trip = done + number - work.begin
        stage = lax.rem(trip, jnp.int32(shared.words.shape[0]))
        _mosaic.wait(shared.words_are_there.at[stage])
        blocks = [_load_block(shared, packing, tile, stage, i) for i in range(tile.blocks)]
        for part in range(packing.parts):
            piece = trip * packing.parts + part
            stage_of_x = lax.rem(piece, jnp.int32(shared.x.shape[0]))
            before = lax.rem(piece + shared.x.shape[0] - 1, jnp.int32(shared.x.shape[0]))
            is_first = (number == work.begin) & (part == 0)
            for i, block in enumerate(blocks):
                weights = unpack(packing, *block, part, exponents, arguments.x.dtype)
                if i == 0:
                    _mosaic.wait(shared.x_is_there.at[stage_of_x])
                add(i * BLOCK, weights, shared.x.at[stage_of_x])
                # All products before are done when only this one is not.
                _mosaic.wait_products(1)
                if i == 0:
                    pl.when(jnp.logical_not(is_first))(
                        partial(_mosaic.arrive, shared.x_is_free.at[before])
                    )
        _mosaic.arrive(shared.words_are_free.at[stage])

    sums = _mosaic.sum_products((tile.rows, tile.tokens), work.begin, work.end, step)
    last = (done + work.num_steps) * packing.parts - 1
    _mosaic.arrive(shared.x_is_free.at[lax.rem(last, jnp.int32(shared.x.shape[0]))])
    if not packing.groups:
        scale = _mosaic.load_column(arguments.scale.at[_rows_of(tile, work)])
        sums = sums * lax.broadcast_in_dim(scale, sums.shape, [0])
    _store(arguments, shared, tile, work, sums)


def _load_block(
    shared: Shared, packing: Packing, tile: HopperTile, stage: Any, block: int
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """Words, scales and zero points of a step, for one of a warpgroup's blocks of rows."""
    rows = pl.ds(lax.axis_index("warpgroup") * tile.rows + block * BLOCK, BLOCK)
    words = _mosaic.matrix(shared.words[stage, rows])
    if shared.scale is None or shared.zero is None:
        return words, [], []
    at = [(stage, group, rows) for group in range(packing.groups)]
    scales = [_mosaic.load_column(shared.scale.at[i]) for i in at]
    zeros = [_mosaic.load_column(shared.zero.at[i]).astype(jnp.float32) for i in at]
    return words, scales, zeros


def _store(
    arguments: Arguments, shared: Shared, tile: HopperTile, work: Work, sums: jax.Array
) -> None:
    """Write a warpgroup's rows of the transposed product, some tokens at a time."""
    out = arguments.out
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
