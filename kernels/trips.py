"""Which keys the programs of the attention kernels see, and in which trips they walk over them.

Knows positions only, not where keys lie or what is computed from them. Everything but `Tile` works
on traced values, inside the kernels of decode and ragged attention.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from swiftjax.kernels import _triton
from swiftjax.kernels.quantized_pages import Pages


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Static numbers of a kernel."""

    page_size: int
    head_dim: int
    block_k: int  # keys per trip: whole pages, or a whole part of one
    window: int  # of all sequences; 0 where there is none, or each has its own
    scale: float

    @property
    def width(self) -> int:
        """The head width as Triton can load it."""
        return _triton.power_of_two(self.head_dim)


def make_tile(pages: Pages, block_k: int, *, scale: float, window: int) -> Tile:
    """Describe a kernel that walks these pages."""
    return Tile(
        page_size=pages.shape[2],
        head_dim=pages.shape[3],
        block_k=block_k,
        window=window,
        scale=scale,
    )


class Sight(NamedTuple):
    """What the queries of a program see of what is before them; both traced with `streams`."""

    window: Any  # tokens; the static 0 stands for all
    sink_len: Any = 0

    @property
    def has_sinks(self) -> bool:
        """Whether there may be sinks: known while the kernel is traced."""
        return not isinstance(self.sink_len, int)

    @property
    def is_full(self) -> bool:
        """Whether everything is seen, with nothing to compute: known likewise."""
        return isinstance(self.window, int) and self.window == 0


def visible(keys: Array, lowest: Any, last: Any, sight: Sight) -> Array:
    """Which key positions some query between the positions `lowest` and `last` may see."""
    seen = keys <= last
    if sight.is_full:
        return seen
    near = keys > lowest - sight.window
    return seen & ((near | (keys < sight.sink_len)) if sight.has_sinks else near)


def trip_ranges(lowest: Any, last: Any, sight: Sight, size: int) -> list[tuple[Any, Any, bool]]:
    """List the trips that queries `lowest` to `last` need as (first, past the last, needs a mask).

    A trip holds `size` keys. `last` below 0 or below `lowest` stands for no queries and gets empty
    ranges.
    """
    block_k = jnp.int32(size)
    total = jnp.where(last < lowest, 0, lax.div(jnp.maximum(last + 1, 0) + block_k - 1, block_k))
    if sight.is_full:
        full = jnp.minimum(lax.div(jnp.maximum(lowest + 1, 0), block_k), total)
        return [(jnp.int32(0), full, False), (full, total, True)]
    near = lax.div(jnp.maximum(lowest - sight.window + 1, 0), block_k)
    if not sight.has_sinks:
        return [(jnp.minimum(near, total), total, True)]
    sinks = jnp.minimum(lax.div(sight.sink_len + block_k - 1, block_k), total)
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
