"""Decodes in a step with long chunks: several programs share a context, as where all are decodes.

In the ragged kernel one program walks all keys of a decode, 64 in 1.6 us on an H200: 8,192 take 211
us, however few decodes there are, where the bytes of 16 take 134. Called by `ragged_attention.py`.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from swiftjax.kernels import _triton
from swiftjax.kernels.decode_attention import DecodeConfig, choose_decode_config, split_decode
from swiftjax.kernels.quantized_pages import Pages

# Decodes come first in a step. What is past so many sequences is left to the ragged kernel: steps
# without decodes have these programs too.
MOST_SEQUENCES = 64
NUM_SPLITS = 8  # for each sequence and KV head: 16 contexts of eight heads are 1,024 programs


def attend_single_tokens(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    query_starts: Int32[Array, " B+1"],
    context_lens: Int32[Array, " B"],
    others: Float[Array, "T N H"],
    *,
    scale: float,
    window: int,
) -> tuple[Float[Array, "T N H"], Bool[Array, " B"]]:
    """Attend for sequences with one new token, and put what they get into their rows of `others`.

    Also says which sequences these are: of the first MOST_SEQUENCES.
    """
    num_tokens, num_seqs = q.shape[0], context_lens.shape[0]
    count = min(MOST_SEQUENCES, num_seqs)
    is_single = (jnp.diff(query_starts) == 1) & (jnp.arange(num_seqs) < count)
    first, mine = query_starts[:count], is_single[:count]
    out = split_decode(
        q.at[first].get(mode="clip"),
        k_pages,
        v_pages,
        page_table[:count],
        jnp.where(mine, context_lens[:count], 0),
        scale=scale,
        window=window,
        streams=None,
        config=_choose_config(q, k_pages, page_table),
    )
    # Rows that are none of its are past the end, each another one.
    rows = jnp.where(mine, first, num_tokens + jnp.arange(count, dtype=jnp.int32))
    return others.at[rows].set(out, mode="drop", unique_indices=True), is_single


def _choose_config(
    q: Float[Array, "T N H"], k_pages: Pages, page_table: Int32[Array, "B M"]
) -> DecodeConfig:
    _, num_kv_heads, page_size, head_dim = k_pages.shape
    # As for one sequence, which gets the most splits that its context allows.
    config = choose_decode_config(
        num_seqs=1,
        num_kv_heads=num_kv_heads,
        max_context=page_table.shape[1] * page_size,
        page_size=page_size,
        width=_triton.power_of_two(head_dim),
        itemsize=q.dtype.itemsize,
    )
    return replace(config, num_splits=min(config.num_splits, NUM_SPLITS))
