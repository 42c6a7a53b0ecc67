"""Products of many tokens on Hopper GPUs, with what follows them computed in the same kernel.

What follows: scales of 8-bit rows and weights, a residual, or silu(gate) * up. A program is up to
two warpgroups that multiply 64 tokens each by the same weights, and one that loads; two programs
share a tile's weights. There is one program on each multiprocessor, and it takes tiles until there
are none left, so that the next tile arrives while a result is still being stored. The plain
computation is `matmul.py`'s and `quantized_reference.py`'s.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from swiftjax.kernels import _mosaic
from swiftjax.kernels.dense_compute import compute
from swiftjax.kernels.dense_work import (
    FEW_TOKENS,
    LEAST_BUSY,
    LEAST_FULL,
    LEAST_TOKENS,
    MOST_TOKENS,
    PIECE_BYTES,
    ROWS,
    STORED,
    Arguments,
    DenseTile,
    Plan,
    Program,
    Ref,
    Shared,
    Work,
    choose_dense_tile,
    take_work,
)

# Registers of a thread: what computing and loading warpgroups take from, and leave, each other.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40


def is_dense_faster(
    num_tokens: int, num_inputs: int, num_outputs: int, dtype: jnp.dtype, *, gated: bool = False
) -> bool:
    """Whether `dense_matmul` takes less time than XLA's product and what follows it."""
    tile = choose_dense_tile(num_tokens, num_inputs * dtype.itemsize, num_outputs, gated=gated)
    if dtype.itemsize > 2 or tile is None:
        return False
    if gated:
        fullness = tile.fullness(num_tokens, num_outputs)
        if num_tokens == tile.rows:  # weights are read once, and that is what takes the time
            return dtype.itemsize == 2 and fullness >= LEAST_BUSY
        is_full = fullness >= LEAST_FULL or num_tokens <= FEW_TOKENS
        return dtype.itemsize == 2 and num_tokens >= LEAST_TOKENS and is_full
    if num_tokens < LEAST_TOKENS:
        return False
    if dtype.itemsize == 1:  # XLA has a pass for scales
        return num_tokens <= MOST_TOKENS or num_inputs < num_outputs
    return num_tokens <= MOST_TOKENS and num_inputs <= num_outputs


# Traced and lowered once for all layers of a model: that takes seconds.
@partial(jax.jit, static_argnames=("outputs_first", "gated", "tile"))
def dense_matmul(
    x: Float[Array, "T K"],
    kernel: Float[Array, "K N"] | Float[Array, "N K"],
    *,
    residual: Float[Array, "T N"] | None = None,
    scales: tuple[Float32[Array, " T"], Float32[Array, " N"]] | None = None,
    outputs_first: bool = False,
    gated: bool = False,
    tile: DenseTile | None = None,
) -> Float[Array, "T columns"]:
    """x @ kernel, its rows and columns scaled, silu(gate) * up of it, or a residual added.

    Sums are float32, and so is what follows. Operands of 8 bits are [N K] and have scales; their
    result is bfloat16. Of gates, then ups, in the columns the result is [T N/2]. Benchmarks pass a
    tile.
    """
    num_outputs = kernel.shape[0 if outputs_first else 1]
    row_bytes = x.shape[1] * x.dtype.itemsize
    tile = tile or choose_dense_tile(x.shape[0], row_bytes, num_outputs, gated=gated)
    assert tile is not None and tile.fits(x.shape[0], num_outputs), "no tile fills this product"
    plan = Plan(
        tile=tile,
        cluster=_mosaic.known_cluster(tile.cluster(x.shape[0])),
        outputs_first=outputs_first,
        gated=gated,
        has_residual=residual is not None,
        is_scaled=scales is not None,
    )
    dtype = jnp.dtype(jnp.bfloat16) if x.dtype.itemsize == 1 else x.dtype
    piece = PIECE_BYTES // x.dtype.itemsize
    columns = tile.columns // plan.parts
    weights = (columns, piece) if outputs_first else (piece, columns)
    given = [*(() if residual is None else (residual,)), *(scales or ())]
    work = (x.shape[0] // tile.rows) * (num_outputs // tile.columns)
    return _mosaic.launch(
        partial(_kernel, plan),
        [x, kernel, *given],
        jax.ShapeDtypeStruct((x.shape[0], num_outputs // plan.parts), dtype),
        scratch=[
            _mosaic.tiles((tile.stages, tile.rows, piece), x.dtype),
            _mosaic.tiles((tile.stages, plan.parts, *weights), kernel.dtype),
            _mosaic.tiles((tile.warpgroups, 2, ROWS, STORED), dtype),
            _mosaic.Barrier(num_arrivals=1 + plan.parts, num_barriers=tile.stages),
            _mosaic.cluster_barrier(
                plan.cluster, num_arrivals=tile.warpgroups, num_barriers=tile.stages
            ),
        ],
        num_programs=min(_mosaic.num_multiprocessors(), work) // plan.cluster,
        num_warpgroups=tile.warpgroups + 1,
        cluster=plan.cluster,
    )


def _kernel(plan: Plan, *refs: Ref) -> None:
    program = _program_of(plan, list(refs))
    tile = plan.tile
    warpgroup = lax.axis_index("warpgroup")
    first, step = lax.axis_index("program"), jnp.int32(lax.axis_size("program"))
    rounds = pl.cdiv(program.num_work - first, step)

    def take_turns(run: Callable[[Program, Work, Any], None]) -> None:
        @pl.loop(0, rounds)
        def _(index: Any) -> None:
            run(program, take_work(program, first + index * step), index * program.num_pieces)

    @pl.when(warpgroup < tile.warpgroups)
    def _() -> None:
        _mosaic.set_max_registers(COMPUTE_REGISTERS, action="increase")
        take_turns(compute)
        _mosaic.wait_copies_read(0)

    @pl.when(warpgroup == tile.warpgroups)
    def _() -> None:
        _mosaic.set_max_registers(LOAD_REGISTERS, action="decrease")
        take_turns(_load)
        # Nobody leaves before all is read, here and by the program that shares the weights.
        done = rounds * program.num_pieces

        @pl.loop(jnp.maximum(done - tile.stages, 0), done)
        def _(trip: Any) -> None:
            _mosaic.wait(program.shared.are_free.at[lax.rem(trip, jnp.int32(tile.stages))])


def _program_of(plan: Plan, refs: list[Ref]) -> Program:
    x, kernel = refs.pop(0), refs.pop(0)
    residual = refs.pop(0) if plan.has_residual else None
    row_scale, scale = (refs.pop(0), refs.pop(0)) if plan.is_scaled else (None, None)
    arguments = Arguments(x, kernel, residual, row_scale, scale, out=refs.pop(0))
    return Program(plan, arguments, Shared(*refs))


def _load(program: Program, work: Work, done: Any) -> None:
    """Copy the tokens and weights of all pieces, as soon as there is room."""
    plan, arguments, shared = program
    tile, piece = plan.tile, program.piece
    tokens = pl.ds(work.token, tile.rows)

    @pl.loop(0, program.num_pieces)
    def _(number: Any) -> None:
        trip = done + number
        stage = lax.rem(trip, jnp.int32(tile.stages))
        pl.when(trip >= tile.stages)(partial(_mosaic.wait, shared.are_free.at[stage]))
        are_there, inputs = shared.are_there.at[stage], pl.ds(number * piece, piece)
        _mosaic.copy_in(arguments.x.at[tokens, inputs], shared.x.at[stage], are_there)
        for part in range(plan.parts):
            first = part * arguments.out.shape[1] + work.column
            outputs = pl.ds(first, tile.columns // plan.parts)
            at = (outputs, inputs) if plan.outputs_first else (inputs, outputs)
            target = shared.kernel.at[stage, part]
            _mosaic.copy_in_cluster(plan.cluster, arguments.kernel.at[at], target, are_there)
