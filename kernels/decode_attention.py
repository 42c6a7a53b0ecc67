"""Paged decode attention: one new token per sequence over its whole cached context.

Called by the model in steps where every sequence has exactly one new token. The op's meaning is
`reference.decode_attention`.
"""

import jax
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import reference, xla_attention
from swiftjax.kernels.implementation import Implementation, check_attention, choose_implementation


def decode_attention(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    page_table: Int32[Array, "B M"],
    context_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int = 0,
    sink_len: int = 0,
    q_sink: Float[Array, "B N H"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B N H"]:
    """Attend from the last token of each sequence; a row with context_len 0 gives zeros.

    `window` counts tokens, the query's own included, 0 meaning all; the `sink_len` first tokens
    stay visible beyond it and are scored with `q_sink`. Slots at or past context_len may hold
    anything. Raises ValueError for arguments that do not fit together.
    """
    implementation = implementation or choose_implementation(jax.default_backend())
    check_attention(q, k_pages, window, sink_len, q_sink, implementation)
    module = reference if implementation == "reference" else xla_attention
    return module.decode_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        context_lens,
        scale=scale,
        window=window,
        sink_len=sink_len,
        q_sink=q_sink,
    )
