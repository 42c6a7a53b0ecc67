"""Which keys the programs of the attention kernels see, and in which trips they walk over them.

Knows positions only, not where keys lie or what is computed from them. Everything but `Tile` works
on traced values, inside the kernels of decode and ragged attention.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from swiftjax.kernels import _triton


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Static numbers of a kernel."""

    page_size: int
    head_dim: int
    block_k: int  # keys per trip: whole pages, or a whole part of one
    window: int
    sink_len: int
    scale: float

    @property
    def width(self) -> int:
        """The head width as Triton can load it."""
        return _triton.power_of_two(self.head_dim)

    @property
    def sink_trips(self) -> int:
        """Trips that hold sink keys."""
        return -(-self.sink_len // self.block_k)


def make_tile(
    pages: Float[Array, "P K S H"], block_k: int, *, scale: float, window: int, sink_len: int
) -> Tile:
    """Describe a kernel that walks these pages."""
    return Tile(
        page_size=pages.shape[2],
        head_dim=pages.shape[3],
        block_k=block_k,
        window=window,
        sink_len=sink_len,
        scale=scale,
    )


def visible(keys: Array, lowest: Any, last: Any, tile: Tile) -> Array:
    """Which key positions some query between the positions `lowest` and `last` may see."""
    seen = keys <= last
    if not tile.window:
        return seen
    near = keys > lowest - tile.window
    return seen & ((near | (keys < tile.sink_len)) if tile.sink_len else near)


def trip_ranges(lowest: Any, last: Any, tile: Tile) -> list[tuple[Any, Any, bool]]:
    """List the trips that queries `lowest` to `last` need as (first, past the last, needs a mask).

    `last` below 0 or below `lowest` stands for no queries and gets empty ranges.
    """
    block_k = jnp.int32(tile.block_k)
    total = jnp.where(last < lowest, 0, lax.div(jnp.maximum(last + 1, 0) + block_k - 1, block_k))
    if not tile.window:
        full = jnp.minimum(lax.div(jnp.maximum(lowest + 1, 0), block_k), total)
        return [(jnp.int32(0), full, False), (full, total, True)]
    sinks = jnp.minimum(tile.sink_trips, total)
    near = lax.div(jnp.maximum(lowest - tile.window + 1, 0), block_k)
    return [(jnp.int32(0), sinks, True), (jnp.maximum(near, sinks), total, True)]


def split_ranges(
    ranges: list[tuple[Any, Any, bool]], split: Any, num_splits: int
) -> list[tuple[Any, Any, bool]]:
    """Cut the ranges' trips, taken one after the other, into equal parts and keep part `split`."""
    if num_splits == 1:
        return ranges
    trips = sum(end - begin for begin, end, _ in ranges)
    share = lax.div(trips + (num_splits - 1), jnp.int32(num_splits))
    skip = split * share
    parts = []
    for begin, end, masked in ranges:
        parts.append(
            (
                jnp.minimum(begin + jnp.maximum(skip, 0), end),
                jnp.minimum(begin + jnp.maximum(skip + share, 0), end),
                masked,
            )
        )
        skip -= end - begin
    return parts
