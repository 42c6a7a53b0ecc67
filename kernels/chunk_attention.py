"""Attention of long prompt chunks on Hopper GPUs: another implementation of ragged attention.

A program is two warpgroups that compute and one that loads. While one of the two has the tensor
cores, the other computes its softmax, and the next keys and values are already being copied, page
by page (the schedule of FlashAttention-3, Shah et al. 2024, here over a page table). There is one
program on each multiprocessor, and it takes query blocks until there are none left.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import _mosaic
from swiftjax.kernels.chunk_compute import compute
from swiftjax.kernels.chunk_work import (
    BLOCK_K,
    BLOCK_Q,
    NUM_COMPUTING,
    NUM_STAGES,
    ROWS,
    TILE_ROWS,
    Arguments,
    Chunks,
    Ref,
    Shared,
    Work,
    take_work,
)
from swiftjax.kernels.quantized_pages import Pages, QuantizedPages
from swiftjax.kernels.query_blocks import QueryBlocks
from swiftjax.kernels.streams import Streams

DTYPES, HEAD_DIMS = ("bfloat16", "float16"), (64, 128)
# Registers of a thread: what computing and loading warpgroups take from, and leave, each other.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40


def can_attend_chunks(q: Float[Array, "T N H"], k_pages: Pages, streams: Streams | None) -> bool:
    """Whether this kernel knows such queries, pages and limits; Triton's serves all others."""
    # Queries are copied in tiles of TILE_ROWS tokens, and jax counts whole ones only.
    has_room = q.shape[0] >= BLOCK_Q and q.shape[0] % TILE_ROWS == 0
    is_known = q.shape[2] in HEAD_DIMS and q.dtype.name in DTYPES
    is_plain = streams is None and not isinstance(k_pages, QuantizedPages)
    return has_room and is_known and is_plain


def chunk_attention(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    blocks: QueryBlocks,
    *,
    scale: float,
    window: int,
) -> Float[Array, "T N H"]:
    """Attend for query blocks of BLOCK_Q tokens; T >= BLOCK_Q. Other rows hold anything.

    The blocks are aligned to TILE_ROWS, T is a multiple of it.
    """
    assert not isinstance(k_pages, QuantizedPages) and not isinstance(v_pages, QuantizedPages)
    num_heads = q.shape[1]
    chunks = Chunks(
        page_size=k_pages.shape[2],
        group=num_heads // k_pages.shape[1],
        window=window,
        scale=scale,
    )
    blocked = [blocks.sequence, blocks.first, blocks.end, blocks.position, blocks.count[None]]
    return _launch(
        chunks,
        min(_mosaic.num_multiprocessors(), num_heads * blocks.first.shape[0]),
        q,
        [page_table, *blocked, k_pages, v_pages],
    )


# Traced and lowered once for all layers of a model: that takes seconds.
@partial(jax.jit, static_argnames=("chunks", "num_programs"))
def _launch(
    chunks: Chunks, num_programs: int, q: Float[Array, "T N H"], rest: list[Array]
) -> Float[Array, "T N H"]:
    head_dim, copies = q.shape[2], BLOCK_K // chunks.page_size
    return _mosaic.launch(
        partial(_kernel, chunks),
        [q, *rest],
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch=[
            _mosaic.tiles((NUM_COMPUTING, ROWS, head_dim), q.dtype),
            _mosaic.tiles((NUM_STAGES, BLOCK_K, head_dim), q.dtype),
            _mosaic.tiles((NUM_STAGES, BLOCK_K, head_dim), q.dtype),
            _mosaic.lines((NUM_COMPUTING, ROWS, head_dim), q.dtype),
            _mosaic.Barrier(num_barriers=NUM_COMPUTING),
            *(_mosaic.Barrier(num_arrivals=copies, num_barriers=NUM_STAGES) for _ in range(2)),
            *(
                _mosaic.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=NUM_STAGES)
                for _ in range(2)
            ),
            _mosaic.Barrier(num_arrivals=NUM_COMPUTING),
        ],
        num_programs=num_programs,
        num_warpgroups=NUM_COMPUTING + 1,
    )


def _kernel(chunks: Chunks, *refs: Ref) -> None:
    count = len(Arguments._fields)
    arguments, shared = Arguments(*refs[:count]), Shared(*refs[count:])
    warpgroup = lax.axis_index("warpgroup")
    num_work = arguments.count[0] * arguments.q.shape[1]
    rounds = pl.cdiv(num_work, jnp.int32(lax.axis_size("program")))

    @pl.when(warpgroup < NUM_COMPUTING)
    def _() -> None:
        _mosaic.set_max_registers(COMPUTE_REGISTERS, action="increase")

        def attend(index: Any, done: Any) -> Any:
            work = take_work(arguments, index, num_work, chunks)
            pl.when(work.is_there)(lambda: compute(arguments, shared, work, done, chunks))
            return done + work.num_trips

        lax.fori_loop(0, rounds, attend, jnp.int32(0))

    @pl.when(warpgroup == NUM_COMPUTING)
    def _() -> None:
        _mosaic.set_max_registers(LOAD_REGISTERS, action="decrease")

        def load(index: Any, done: Any) -> Any:
            work = take_work(arguments, index, num_work, chunks)
            _load(arguments, shared, work, done, chunks)
            return done + work.num_trips

        done = lax.fori_loop(0, rounds, load, jnp.int32(0))

        # Nobody leaves before all is read.
        @pl.loop(jnp.maximum(done - NUM_STAGES, 0), done)
        def _(trip: Any) -> None:
            stage = lax.rem(trip, jnp.int32(NUM_STAGES))
            _mosaic.wait(shared.keys_are_free.at[stage])
            _mosaic.wait(shared.values_are_free.at[stage])


def _load(arguments: Arguments, shared: Shared, work: Work, done: Any, chunks: Chunks) -> None:
    """Copy keys and values of all trips, as soon as there is room."""
    kv_head = lax.div(work.head, jnp.int32(chunks.group))
    pages, last_page = BLOCK_K // chunks.page_size, arguments.page_table.shape[1] - 1

    @pl.loop(0, work.num_trips)
    def _(number: Any) -> None:
        trip = done + number
        stage = lax.rem(trip, jnp.int32(NUM_STAGES))
        for source, target, is_there, is_free in (
            (arguments.k_pages, shared.keys, shared.keys_are_there, shared.keys_are_free),
            (arguments.v_pages, shared.values, shared.values_are_there, shared.values_are_free),
        ):
            pl.when(trip >= NUM_STAGES)(partial(_mosaic.wait, is_free.at[stage]))
            for i in range(pages):
                page = jnp.minimum((work.begin + number) * pages + i, last_page)
                page_id = arguments.page_table[work.sequence, page]
                part = pl.ds(i * chunks.page_size, chunks.page_size)
                _mosaic.copy_in(
                    source.at[page_id, kv_head], target.at[stage, part], is_there.at[stage]
                )
