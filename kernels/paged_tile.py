"""What the two attention kernels share inside a program: tiles of pages and the softmax.

Knows neither grids nor which queries it serves. Everything here runs inside a Pallas kernel: tile
sizes are powers of two, loads outside an array are masked. Letters as in `reference.py`; X query
rows and C keys make one tile, W is the head width rounded up to a power of two.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from swiftjax.kernels import _triton
from swiftjax.kernels.trips import Sight, Tile

MASKED = -1e30  # finite: the difference of two masked scores must not be NaN
LOG2_E = 1.4426950408889634  # exp2 is the hardware's own exponential

Ref = Any  # a Pallas reference to a whole array in device memory


class Softmax(NamedTuple):
    """Running state of the online softmax, float32; `peak` is in units of log2."""

    out: Float[Array, "X W"]
    peak: Float[Array, " X"]
    total: Float[Array, " X"]


def pl_range(n: int) -> Int32[Array, " n"]:
    """Count 0..n-1 in a vector."""
    return lax.iota(jnp.int32, n)


def empty_softmax(rows: int, width: int) -> Softmax:
    """Make the state before the first key."""
    return Softmax(
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def rows_at(ref: Ref, index: tuple[Any, ...], tile: Tile) -> Any:
    """Name head vectors, one per entry of the index vectors (scalars repeat), as a tile `[X W]`."""
    where = tuple(x[:, None] if getattr(x, "ndim", 0) == 1 else x for x in index)
    return ref.at[(*where, pl_range(tile.width)[None, :])]


def rows_mask(live: Bool[Array, " X"], tile: Tile) -> Bool[Array, "X W"]:
    """Mask of a tile: live rows, and no columns past the head width."""
    mask = jnp.broadcast_to(live[:, None], (live.shape[0], tile.width))
    if tile.width == tile.head_dim:
        return mask
    return mask & (pl_range(tile.width) < tile.head_dim)[None, :]


def load_rows(
    ref: Ref, index: tuple[Any, ...], live: Bool[Array, " X"] | None, tile: Tile
) -> Num[Array, "X W"]:
    """Load head vectors; rows that are not live, and columns past the head width, are zero."""
    at = rows_at(ref, index, tile)
    if live is None and tile.width == tile.head_dim:
        return _triton.load(at)
    if live is None:
        rows = next(x.shape[0] for x in index if getattr(x, "ndim", 0) == 1)
        live = jnp.ones((rows,), jnp.bool_)
    # A zero of the array's own type: an integer is not made an e4m3 number.
    return _triton.load(at, mask=rows_mask(live, tile), other=jnp.zeros((), ref.dtype))


def store_rows(
    ref: Ref,
    index: tuple[Any, ...],
    values: Float[Array, "X W"],
    live: Bool[Array, " X"],
    tile: Tile,
) -> None:
    """Store the live rows as head vectors."""
    at = rows_at(ref, index, tile)
    _triton.store(at, values.astype(ref.dtype), mask=rows_mask(live, tile))


class Keys(NamedTuple):
    """Where the keys of one trip lie; `page` is one id if the trip does not leave its page."""

    page: Array
    offset: Int32[Array, " C"]
    position: Int32[Array, " C"]


def page_ids(table_ref: Ref, seq: Any, trip: Any, last: Any, tile: Tile) -> Array:
    """Look up the page of a trip, or of each of its keys; columns past `last` are not read."""
    first = trip * tile.block_k
    if tile.block_k <= tile.page_size:
        return table_ref[seq, lax.div(jnp.clip(first, 0, last), jnp.int32(tile.page_size))]
    position = jnp.clip(first + pl_range(tile.block_k), 0, last)
    return _triton.load(table_ref.at[seq, lax.div(position, jnp.int32(tile.page_size))])


def walk(
    ranges: list[tuple[Any, Any, bool]],
    table_ref: Ref,
    seq: Any,
    last: Any,
    tile: Tile,
    visit: Callable[[Keys, Softmax, bool], Softmax],
    state: Softmax,
) -> Softmax:
    """Visit the keys of every trip in order; `last` is the highest position that may be read.

    Page ids are loaded one trip ahead: Triton does not overlap a load with the arithmetic when its
    address comes from another load of the same trip (prefill 325 -> 446 TFLOP/s on an H200).
    """
    last = jnp.maximum(last, 0)

    def step(trip: Array, carry: tuple[Softmax, Array], masked: bool) -> tuple[Softmax, Array]:
        state, page = carry
        following = page_ids(table_ref, seq, trip + 1, last, tile)
        position = trip * tile.block_k + pl_range(tile.block_k)
        # Not simplified where block_k divides the page: kept in registers across trips, the
        # offsets make ptxas serialise the tensor core instructions (446 -> 368 TFLOP/s).
        offset = lax.rem(position, jnp.int32(tile.page_size))
        return visit(Keys(page, offset, position), state, masked), following

    for begin, end, masked in ranges:
        carry = (state, page_ids(table_ref, seq, begin, last, tile))
        state, _ = lax.fori_loop(begin, end, partial(step, masked=masked), carry)
    return state


def dot(a: Array, b: Array) -> Array:
    """Multiply two tiles with float32 accumulation; float32 operands are not cut to tf32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def score(
    q: Float[Array, "X W"],
    q_sink: Float[Array, "X W"] | None,
    k: Float[Array, "C W"],
    k_scale: Float[Array, " C"] | None,
    keys: Keys,
    sight: Sight,
) -> Float[Array, "X C"]:
    """Multiply queries with keys, sink keys with the queries meant for them.

    The scale of attention is not yet applied, that of keys in 8 bits is.
    """
    scores = dot(q, k.T)
    if q_sink is not None:
        scores = jnp.where((keys.position < sight.sink_len)[None, :], dot(q_sink, k.T), scores)
    return scores if k_scale is None else scores * k_scale[None, :]


def accumulate(
    state: Softmax,
    scores: Array,
    allowed: Bool[Array, "X C"] | None,
    values: Array,
    v_scale: Array | None,
    tile: Tile,
) -> Softmax:
    """Take one trip's keys into the online softmax; `allowed` None means that all are visible."""
    if allowed is not None:
        scores = jnp.where(allowed, scores, MASKED)
    scale = tile.scale * LOG2_E
    peak = jnp.maximum(state.peak, scores.max(axis=1) * scale)
    weights = _triton.exp2(_triton.multiply_add(scores, scale, -peak[:, None]))
    if allowed is not None:
        # For rows that have seen no key yet, where MASKED - MASKED is 0.
        weights = jnp.where(allowed, weights, 0.0)
    shrink = _triton.exp2(state.peak - peak)
    scaled = weights if v_scale is None else weights * v_scale[None, :]
    out = state.out * shrink[:, None] + dot(scaled.astype(values.dtype), values)
    return Softmax(out, peak, state.total * shrink + weights.sum(axis=1))


def normalise(state: Softmax) -> Float[Array, "X W"]:
    """Divide by the weights' sum; rows that saw no key give zeros."""
    return state.out * (1.0 / jnp.where(state.total > 0, state.total, 1.0))[:, None]
