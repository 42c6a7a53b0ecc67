"""What the queries of a streaming step may see: sinks and a window of each sequence's own.

An optional argument of both attention ops; `reference.py` says what it means. Knows neither pages
nor implementations.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

NO_WINDOW = 2**30  # longer than any page table, and no overflow when taken from a position


class Streams(NamedTuple):
    """Per sequence; a sequence with window 0 and no sinks sees all, like in any other step."""

    q_sink: Float[Array, "T N H"]  # the queries, rotated to where the sinks are to be seen from
    sink_lens: Int32[Array, " B"]  # first tokens that stay visible
    windows: Int32[Array, " B"]  # last tokens that are visible, the query's own included; 0: all

    def reach(self) -> Int32[Array, " B"]:
        """The windows, with a number that no position exceeds for those without one."""
        return jnp.where(self.windows > 0, self.windows, NO_WINDOW)


def stream_arrays(streams: Streams | None) -> list[Array]:
    """What a kernel is handed in addition: none, or q_sink, sink_lens, the reach of windows."""
    return [] if streams is None else [streams.q_sink, streams.sink_lens, streams.reach()]
