"""How the queries of a streaming step see the sinks: from the end of the window, wherever they are.

The rule of StreamingLLM (arXiv 2309.17453, 3.2) numbers tokens by their place in the cache: sinks,
then the window. Keys were rotated to their places in the text, so inside the window distances are
right as they are. To the sinks they are right once the query stands at most at the last place of
the cache, so it is rotated back to there, for these scores only. Made by `layer_inputs.py`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from swiftjax import kernels
from swiftjax.batch import Batch
from swiftjax.model.rope import RopeTable, attention_factor, rope_angles
from swiftjax.model_config import RopeConfig


class SinkView(NamedTuple):
    """What all layers share of it."""

    cos: Float[Array, "T half"]  # of the angles to turn rotated queries by
    sin: Float[Array, "T half"]
    sink_lens: Int32[Array, " B"]
    windows: Int32[Array, " B"]

    def of(self, q: Float[Array, "T N H"], window: int) -> kernels.Streams:
        """Limits and queries of one layer, whose queries `q` are rotated to their positions.

        A layer with a `window` of its own (0: none) keeps it, counted in places of the cache: it
        sees all of a cache that is no longer, and of any other its last tokens, which are no sinks.
        """
        sink_lens, windows = self.sink_lens, self.windows
        if window:
            sees_all = (windows > 0) & (sink_lens + windows <= window)
            sink_lens = jnp.where(sees_all, sink_lens, 0)
            windows = jnp.where(sees_all, windows, window)
        return kernels.Streams(kernels.rotate(q, self.cos, self.sin), sink_lens, windows)


def make_sink_view(rope: RopeConfig, table: RopeTable, batch: Batch) -> SinkView | None:
    """Work out how far each query stands past the last place of its cache, and the angle of that.

    None in an engine that was not built for streaming. For every kind of rotation but dynamic.
    """
    if batch.windows is None or batch.sink_lens is None:
        return None
    tokens = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32)
    # A comparison with all ends: jnp.searchsorted would be a loop driven by the host on a GPU.
    owner = (tokens[:, None] >= batch.query_starts[None, 1:]).sum(axis=1, dtype=jnp.int32)
    last_place = batch.sink_lens + batch.windows - 1
    is_streaming = batch.windows > 0
    over = batch.positions - jnp.take(last_place, owner, mode="clip")
    over = jnp.where(jnp.take(is_streaming, owner, mode="clip"), jnp.maximum(over, 0), 0)
    cos, sin = rope_angles(table, over)
    factor = attention_factor(rope)  # is in the queries already
    return SinkView(cos / factor, -sin / factor, batch.sink_lens, batch.windows)
