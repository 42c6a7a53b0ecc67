"""Attention of long prompt chunks on Hopper GPUs: another implementation of ragged attention.

A program is two warpgroups that compute and one that loads. While one of the two has the tensor
cores, the other computes its softmax, and the next keys and values are already being copied, page
by page (the schedule of FlashAttention-3, Shah et al. 2024, here over a page table). There is one
program on each multiprocessor, and it takes query blocks until there are none left.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import _mosaic
from swiftjax.kernels.quantized_pages import Pages, QuantizedPages
from swiftjax.kernels.query_blocks import QueryBlocks
from swiftjax.kernels.streams import Streams

NUM_COMPUTING = 2  # warpgroups
ROWS = 64  # query tokens of a warpgroup, of one head
BLOCK_Q = NUM_COMPUTING * ROWS
BLOCK_K = 128  # keys per trip
NUM_STAGES = 2  # trips whose keys and values are in shared memory
# Registers of a thread: what computing and loading warpgroups take from, and leave, each other.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40

MIN_CHUNK = ROWS  # new tokens of a sequence from which on this is not mostly padding
# Instead of -inf, whose difference to itself is no number: where a trip shows a row no key at all.
UNSEEN = -1e30
LOG2_E = 1.4426950408889634

Ref = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """Static numbers of the kernel."""

    page_size: int
    group: int  # query heads of a KV head
    window: int  # 0: none
    scale: float


class Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say who may touch it."""

    q: Ref  # [NUM_COMPUTING ROWS H]; later the outputs
    keys: Ref  # [NUM_STAGES BLOCK_K H]
    values: Ref
    rows: Ref  # [NUM_COMPUTING ROWS H]: outputs of blocks that are not whole
    q_is_there: Ref
    keys_are_there: Ref
    values_are_there: Ref
    keys_are_free: Ref
    values_are_free: Ref
    turn: Ref  # the computing warpgroups change places at the tensor cores


class Arguments(NamedTuple):
    """What the kernel reads in device memory, and what it writes."""

    q: Ref  # [T N H]
    page_table: Ref  # [B M]
    sequence: Ref  # [blocks], as the next three: see QueryBlocks
    first: Ref
    end: Ref
    position: Ref
    count: Ref  # [1]
    k_pages: Ref  # [P K S H]
    v_pages: Ref
    out: Ref  # [T N H]


class Work(NamedTuple):
    """One query block of one head; tokens are rows of q, positions are those of a sequence.

    Trips `begin` to `end` show keys; up to `masked` every key is seen by every row.
    """

    is_there: Any
    head: Any
    sequence: Any
    start: Any  # first row of the block as it is loaded: near the end of q that is an earlier one
    tokens: tuple[Any, Any]  # the rows to compute, from and to
    position: Any  # of row `start`
    newest: Any  # the last position that any row sees
    begin: Any
    masked: Any
    end: Any

    @property
    def num_trips(self) -> Any:
        """Trips in all."""
        return jnp.where(self.is_there, self.end - self.begin, 0)


def can_attend_chunks(q: Float[Array, "T N H"], k_pages: Pages, streams: Streams | None) -> bool:
    """Whether this kernel knows these pages and limits; `check_supported` has asked the rest."""
    has_room = q.shape[0] >= BLOCK_Q
    return has_room and streams is None and not isinstance(k_pages, QuantizedPages)


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
    """Attend for query blocks of BLOCK_Q tokens; T >= BLOCK_Q. Other rows hold anything."""
    assert not isinstance(k_pages, QuantizedPages) and not isinstance(v_pages, QuantizedPages)
    num_heads, head_dim = q.shape[1:]
    chunks = Chunks(
        page_size=k_pages.shape[2],
        group=num_heads // k_pages.shape[1],
        window=window,
        scale=scale,
    )
    copies = BLOCK_K // chunks.page_size
    blocked = [blocks.sequence, blocks.first, blocks.end, blocks.position, blocks.count[None]]
    return _mosaic.launch(
        partial(_kernel, chunks),
        [q, page_table, *blocked, k_pages, v_pages],
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
        num_programs=min(_mosaic.num_multiprocessors(), num_heads * blocks.first.shape[0]),
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

        def compute(index: Any, done: Any) -> Any:
            work = _take(arguments, index, num_work, chunks)
            pl.when(work.is_there)(lambda: _compute(arguments, shared, work, done, chunks))
            return done + work.num_trips

        lax.fori_loop(0, rounds, compute, jnp.int32(0))

    @pl.when(warpgroup == NUM_COMPUTING)
    def _() -> None:
        _mosaic.set_max_registers(LOAD_REGISTERS, action="decrease")

        def load(index: Any, done: Any) -> Any:
            work = _take(arguments, index, num_work, chunks)
            _load(arguments, shared, work, done, chunks)
            return done + work.num_trips

        done = lax.fori_loop(0, rounds, load, jnp.int32(0))
        # Nobody leaves before all is read.
        pl.loop(jnp.maximum(done - NUM_STAGES, 0), done)(
            lambda trip: _wait_until_free(shared, trip)
        )


def _take(arguments: Arguments, index: Any, num_work: Any, chunks: Chunks) -> Work:
    """What this program does in a round.

    Later blocks see more keys and come first. Every other round goes through the programs the other
    way round, so that each gets as much to do.
    """
    program, programs = lax.axis_index("program"), jnp.int32(lax.axis_size("program"))
    turned = jnp.where(lax.rem(index, jnp.int32(2)) == 0, program, programs - 1 - program)
    number = num_work - 1 - (index * programs + turned)
    is_there, number = number >= 0, jnp.maximum(number, 0)
    num_heads = jnp.int32(arguments.q.shape[1])
    block, head = lax.div(number, num_heads), lax.rem(number, num_heads)
    first, end, position = (
        ref[block] for ref in (arguments.first, arguments.end, arguments.position)
    )
    start = jnp.minimum(first, arguments.q.shape[0] - BLOCK_Q)
    newest = position + end - first - 1
    trips = jnp.int32(BLOCK_K)
    begin = jnp.int32(0)
    if chunks.window:
        begin = lax.div(jnp.maximum(position - chunks.window + 1, 0), trips)
    # Padding lies at negative positions and sees nothing.
    last = jnp.maximum(lax.div(newest + BLOCK_K, trips), begin)
    whole = begin if chunks.window else jnp.maximum(lax.div(position + 1, trips), begin)
    return Work(
        is_there=is_there & (end > first),
        head=head,
        sequence=jnp.minimum(arguments.sequence[block], arguments.page_table.shape[0] - 1),
        start=start,
        tokens=(first, end),
        position=position - (first - start),
        newest=newest,
        begin=begin,
        masked=jnp.minimum(whole, last),
        end=last,
    )


def _load(arguments: Arguments, shared: Shared, work: Work, done: Any, chunks: Chunks) -> None:
    """Copy keys and values of all trips, as soon as there is room."""
    kv_head = lax.div(work.head, jnp.int32(chunks.group))
    pages, last_page = BLOCK_K // chunks.page_size, arguments.page_table.shape[1] - 1

    @pl.loop(0, work.num_trips)
    def _(number: Any) -> None:
        stage = lax.rem(done + number, jnp.int32(NUM_STAGES))
        pl.when(done + number >= NUM_STAGES)(lambda: _wait_until_free(shared, done + number))
        for i in range(pages):
            page = jnp.minimum((work.begin + number) * pages + i, last_page)
            source = (arguments.page_table[work.sequence, page], kv_head)
            part = (stage, pl.ds(i * chunks.page_size, chunks.page_size))
            _mosaic.copy_in(
                arguments.k_pages.at[source], shared.keys.at[part], shared.keys_are_there.at[stage]
            )
            _mosaic.copy_in(
                arguments.v_pages.at[source],
                shared.values.at[part],
                shared.values_are_there.at[stage],
            )


def _wait_until_free(shared: Shared, trip: Any) -> None:
    stage = lax.rem(trip, jnp.int32(NUM_STAGES))
    _mosaic.wait(shared.keys_are_free.at[stage])
    _mosaic.wait(shared.values_are_free.at[stage])


def _compute(arguments: Arguments, shared: Shared, work: Work, done: Any, chunks: Chunks) -> None:
    """Attend for the rows of one warpgroup."""
    warpgroup = lax.axis_index("warpgroup")
    head_dim = arguments.q.shape[2]
    row = work.start + warpgroup * ROWS
    q = shared.q.at[warpgroup]
    _mosaic.copy_in(arguments.q.at[pl.ds(row, ROWS), work.head], q, shared.q_is_there.at[warpgroup])
    _mosaic.wait(shared.q_is_there.at[warpgroup])
    state = (
        _mosaic.matrix(jnp.zeros((ROWS, head_dim), jnp.float32)),
        _mosaic.column(jnp.full((ROWS,), UNSEEN, jnp.float32)),
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
    scores = _mosaic.product(
        shared.q.at[warpgroup], shared.keys.at[stage], lambda: _change_places(shared)
    )
    _mosaic.arrive(shared.keys_are_free.at[stage])
    scores = scores * (chunks.scale * LOG2_E)
    if is_masked:
        scores = jnp.where(_is_seen(work, trip, chunks), scores, UNSEEN)
    before, highest = highest, jnp.maximum(highest, scores.max(axis=1))
    weight = jnp.exp2(scores - _over_columns(highest, BLOCK_K))
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
    sums = _mosaic.add_product(sums, weight, shared.values.at[stage])
    _mosaic.arrive(shared.values_are_free.at[stage])
    return sums, highest, weights


def _is_seen(work: Work, trip: Any, chunks: Chunks) -> jax.Array:
    shape = (ROWS, BLOCK_K)
    row = lax.axis_index("warpgroup") * ROWS
    query = _mosaic.numbers(shape, 0) + (work.position + row)
    key = _mosaic.numbers(shape, 1) + trip * BLOCK_K
    seen = key <= query
    return seen & (key > query - chunks.window) if chunks.window else seen


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
