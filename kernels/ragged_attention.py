"""Paged attention for ragged batches: prefill chunks and decodes mixed, each with its own context.

Called by the model in every step that is not decode-only, after the step's own keys and values were
written to the pages. The op's meaning is `reference.ragged_attention`.
"""

import jax
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import reference, xla_attention
from swiftjax.kernels.implementation import Implementation, check_attention, choose_implementation


def ragged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    page_table: Int32[Array, "B M"],
    query_starts: Int32[Array, " B+1"],
    context_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int = 0,
    sink_len: int = 0,
    q_sink: Float[Array, "T N H"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "T N H"]:
    """Attend causally from the last query_starts[b+1] - query_starts[b] tokens of every sequence b.

    `query_starts` rises from 0; rows from `query_starts[B]` on are padding and give zeros, and a
    sequence may have no new tokens at all. `window`, `sink_len`, `q_sink` and the errors are those
    of `decode_attention`.
    """
    implementation = implementation or choose_implementation(jax.default_backend())
    check_attention(q, k_pages, window, sink_len, q_sink, implementation)
    module = reference if implementation == "reference" else xla_attention
    return module.ragged_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        query_starts,
        context_lens,
        scale=scale,
        window=window,
        sink_len=sink_len,
        q_sink=q_sink,
    )
