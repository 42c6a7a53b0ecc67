"""Which keys the portable attention sees, and in which trips it walks over them.

Knows positions only, as `trips.py` does for the kernels; here a batch is worked on together, so
limits of its sequences are arrays. Called by `xla_attention.py`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from swiftjax.kernels.streams import Streams


class Mask(NamedTuple):
    """Which keys a query may see: the same for all (ints), or of each sequence (arrays)."""

    window: int | Int32[Array, "..."]  # the int 0 stands for all
    sink_len: int | Int32[Array, "..."] = 0

    def spread(self, axes: int) -> "Mask":
        """The same with so many axes after that of the sequences."""
        if isinstance(self.sink_len, int):
            return self
        shape = (-1, *[1] * axes)
        return Mask(*(jnp.reshape(x, shape) for x in self))

    def of(self, sequence: Int32[Array, ""]) -> "Mask":
        """The same for a batch of this sequence alone."""
        if isinstance(self.sink_len, int):
            return self
        return Mask(*(lax.dynamic_slice_in_dim(jnp.asarray(x), sequence, 1) for x in self))


def make_mask(window: int, streams: Streams | None) -> Mask:
    """What all see, or each."""
    return Mask(window) if streams is None else Mask(streams.reach(), streams.sink_lens)


def plan_trips(
    lowest: Int32[Array, " B"], last: Int32[Array, " B"], mask: Mask, trip: int
) -> tuple[int | Int32[Array, " B"], Int32[Array, " B"], Int32[Array, ""]]:
    """Say how many trips go to the sinks, where each sequence's window starts, and the total.

    `lowest` and `last` are the first and the last query position of each sequence.
    """
    if isinstance(mask.window, int) and not mask.window:
        return 0, jnp.zeros_like(last), (last // trip + 1).max()
    sink_trips = -(-mask.sink_len // trip)
    first_trip = jnp.maximum((lowest - mask.window + 1) // trip, sink_trips)
    window_trips = jnp.maximum(last // trip + 1 - first_trip, 0)
    return sink_trips, first_trip, (sink_trips + window_trips).max()


def visible(
    keys: Int32[Array, "..."], lowest: Int32[Array, "..."], last: Int32[Array, "..."], mask: Mask
) -> Bool[Array, "..."]:
    """Which key positions some query between `lowest` and `last` may see."""
    seen = keys <= last
    if not isinstance(mask.window, int) or mask.window:
        seen &= (keys > lowest - mask.window) | (keys < mask.sink_len)
    return seen
