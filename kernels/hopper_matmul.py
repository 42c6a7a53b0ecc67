"""Products with weights of 4 bits on Hopper GPUs: another implementation, for many tokens.

Computes the transposed product: weights are the tensor cores' first operand, which may lie in
registers, so they are unpacked where they are multiplied, and tokens the second. A program is two
warpgroups that compute and one that loads; each of the two unpacks while the other multiplies.
There is one program on each multiprocessor, and it takes tiles until there are none left. The
layout is that of `packed_int4.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32, UInt8

from swiftjax.kernels import _mosaic
from swiftjax.kernels.hopper_compute import compute
from swiftjax.kernels.hopper_weights import (
    INPUTS,
    PARTS,
    STEP,
    WORDS,
    float_exponents,
    half_exponents,
)
from swiftjax.kernels.hopper_work import (
    NUM_COMPUTING,
    Arguments,
    HopperTile,
    Program,
    Ref,
    Shared,
    Work,
    choose_tile,
    count_work,
    take_work,
)
from swiftjax.kernels.split_k import add_parts, output_of

# Registers of a thread: what computing and loading warpgroups take from, and leave, each other.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40
# What the engine's steps are filled up to. Each is a kernel of its own for every shape of weights,
# which takes seconds to compile: so there are few, and none for fewer tokens than half of the
# first, where Triton's kernel is as fast, or for more than the last (`written_out.py`).
STEP_TOKENS = (64, 128, 256, 512, 768, 1024)


def knows_int4_step(x: Float[Array, "T K"], num_outputs: int, group_size: int) -> bool:
    """Whether `int4_step` is fastest: for some tokens, of types and shapes that tiles fill."""
    tokens = _filled_up(x.shape[0])
    if tokens is None or x.dtype.itemsize != 2:
        return False
    return choose_tile(tokens, x.shape[1], num_outputs, group_size=group_size) is not None


def int4_step(
    x: Float[Array, "T K"],
    kernel: Int32[Array, "N words"],
    scale: Float32[Array, "G N"],
    zero: UInt8[Array, "G N"],
    *,
    group_size: int,
) -> Float[Array, "T N"]:
    """x @ weights.T, as `hopper_int4` computes it for a step that is filled up."""
    filled = _filled_up(x.shape[0])
    assert filled is not None, "see `knows_int4_step`"
    rows = jnp.pad(x, ((0, filled - x.shape[0]), (0, 0)))
    return hopper_int4(rows, kernel, scale, zero, group_size=group_size)[: x.shape[0]]


def _filled_up(num_tokens: int) -> int | None:
    if num_tokens <= STEP_TOKENS[0] // 2:
        return None
    return next((size for size in STEP_TOKENS if num_tokens <= size), None)


# Traced and lowered once for all layers of a model: that takes seconds.
@partial(jax.jit, static_argnames=("group_size", "tile"))
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
    (num_tokens, num_inputs), num_outputs = x.shape, kernel.shape[0]
    tile = tile or choose_tile(num_tokens, num_inputs, num_outputs, group_size=group_size)
    assert tile is not None, "no tile fills this matrix"
    groups = STEP // group_size
    x_stages, stages = tile.stages(groups)
    x = jnp.pad(x, ((0, -num_tokens % tile.tokens), (0, 0)))
    out = output_of(x, num_outputs, x.dtype, tile.splits)
    exponents = [half_exponents(x.dtype)] if tile.scales_late else float_exponents()
    parts = _mosaic.launch(
        partial(_kernel, groups, tile),
        [jnp.asarray(exponents, jnp.int32), x, kernel, scale, zero],
        out,
        scratch=[
            _mosaic.tiles((x_stages, tile.tokens, INPUTS), x.dtype),
            _mosaic.words((stages, tile.outputs, WORDS)),
            _mosaic.tiles((NUM_COMPUTING, 2, tile.stored, tile.rows), out.dtype),
            _mosaic.Barrier(num_barriers=x_stages),
            _mosaic.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=x_stages),
            _mosaic.Barrier(num_arrivals=3, num_barriers=stages),  # words, scale, zero
            _mosaic.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=stages),
            _mosaic.lines((stages, groups, tile.outputs), scale.dtype),
            _mosaic.lines((stages, groups, tile.outputs), zero.dtype),
        ],
        num_programs=min(_mosaic.num_multiprocessors(), count_work(tile, x.shape[0], num_outputs)),
        num_warpgroups=NUM_COMPUTING + 1,
    )
    return add_parts(parts, x.dtype)[:num_tokens]


def _kernel(groups: int, tile: HopperTile, *refs: Ref) -> None:
    arguments, shared = Arguments(*refs[:6]), Shared(*refs[6:])
    whole = Program(arguments, shared, groups, tile)
    warpgroup = lax.axis_index("warpgroup")
    program, programs = lax.axis_index("program"), jnp.int32(lax.axis_size("program"))
    num_work = jnp.int32(count_work(tile, *arguments.out.shape[1:]))

    def take_turns(run: Callable[[Work, Any], None]) -> Any:
        def turn(index: Any, done: Any) -> Any:
            work = take_work(whole, program + index * programs)
            run(work, done)
            return done + work.num_steps

        return lax.fori_loop(0, pl.cdiv(num_work - program, programs), turn, jnp.int32(0))

    @pl.when(warpgroup < NUM_COMPUTING)
    def _() -> None:
        _mosaic.set_max_registers(COMPUTE_REGISTERS, action="increase")
        known = [arguments.exponents[i] for i in range(arguments.exponents.shape[0])]
        take_turns(partial(compute, whole, known))
        _mosaic.wait_copies_read(0)

    @pl.when(warpgroup == NUM_COMPUTING)
    def _() -> None:
        _mosaic.set_max_registers(LOAD_REGISTERS, action="decrease")
        done = take_turns(partial(_load, whole))
        # Nobody leaves before all is read.
        for is_free, stages, count in (
            (shared.words_are_free, shared.words.shape[0], done),
            (shared.x_is_free, shared.x.shape[0], done * PARTS),
        ):
            pl.loop(jnp.maximum(count - stages, 0), count)(
                lambda i, f=is_free, s=stages: _mosaic.wait(f.at[lax.rem(i, jnp.int32(s))])
            )


def _load(program: Program, work: Work, done: Any) -> None:
    """Copy weights, scales and tokens of all steps, as soon as there is room."""
    arguments, shared, groups, tile = program
    outputs, tokens = pl.ds(work.output, tile.outputs), pl.ds(work.token, tile.tokens)

    @pl.loop(work.begin, work.end)
    def _(step: Any) -> None:
        trip = done + step - work.begin
        stage = lax.rem(trip, jnp.int32(shared.words.shape[0]))
        is_free, is_there = shared.words_are_free.at[stage], shared.words_are_there.at[stage]
        pl.when(trip >= shared.words.shape[0])(lambda: _mosaic.wait(is_free))
        words = arguments.words.at[outputs, pl.ds(step * WORDS, WORDS)]
        _mosaic.copy_in(words, shared.words.at[stage], is_there)
        lines = pl.ds(step * groups, groups)
        for source, target in ((arguments.scale, shared.scale), (arguments.zero, shared.zero)):
            _mosaic.copy_in(source.at[lines, outputs], target.at[stage], is_there)
        for part in range(PARTS):
            number = trip * PARTS + part
            stage = lax.rem(number, jnp.int32(shared.x.shape[0]))
            is_free = shared.x_is_free.at[stage]
            pl.when(number >= shared.x.shape[0])(partial(_mosaic.wait, is_free))
            inputs = pl.ds((step * PARTS + part) * INPUTS, INPUTS)
            x = arguments.x.at[tokens, inputs]
            _mosaic.copy_in(x, shared.x.at[stage], shared.x_is_there.at[stage])
