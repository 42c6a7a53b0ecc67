"""What a program of `chunk_attention.py` does in a round: which query block, seeing which keys.

Traced inside the kernel, by all warpgroups alike. Knows nothing about softmax.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swiftjax.kernels import _mosaic

NUM_COMPUTING = 2  # warpgroups
ROWS = 64  # query tokens of a warpgroup, of one head
BLOCK_Q = NUM_COMPUTING * ROWS
BLOCK_K = 128  # keys per trip
NUM_STAGES = 2  # trips whose keys and values are in shared memory
# Rows of q that lie together in shared memory. A copy is told the tile it begins in and the row of
# that tile, and takes the same rows of all further tiles: so it must begin where a tile does.
TILE_ROWS = 8
MIN_CHUNK = ROWS  # new tokens of a sequence from which on this is not mostly padding

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
    # First row of the block as it is loaded, which begins a tile of rows: one before the first to
    # compute, and near the end of q one well before it.
    start: Any
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


def take_work(arguments: Arguments, index: Any, num_work: Any, chunks: Chunks) -> Work:
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
    start = jnp.minimum(
        first - lax.rem(first, jnp.int32(TILE_ROWS)), arguments.q.shape[0] - BLOCK_Q
    )
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


def is_seen(work: Work, trip: Any, chunks: Chunks) -> jax.Array:
    shape = (ROWS, BLOCK_K)
    row = lax.axis_index("warpgroup") * ROWS
    query = _mosaic.numbers(shape, 0) + (work.position + row)
    key = _mosaic.numbers(shape, 1) + trip * BLOCK_K
    seen = key <= query
    return seen & (key > query - chunks.window) if chunks.window else seen
