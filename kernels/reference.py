"""The meaning of every op in plain jnp: one query at a time, whole contexts, float32.

This is the specification and the oracle of the tests, written to be checked by eye; it is slow and
uses memory without restraint. Letters as in `swiftjax/batch.py`; C is M * S, a gathered context.

Pages are `[P K S H]`, or `QuantizedPages` of that shape, whose values times scales are what is read
wherever pages are. Token i of a sequence lies in page `page_table[b, i // S]` at offset `i % S`.
A query at position p attends the keys at positions 0..p; with `window = w` only p-w+1..p. With
`streams` every sequence has a window w of its own (0: all) and also attends 0..s-1, where s is its
sink_len. Scores of these sink keys, outside or inside the window, use the query `q_sink` (the same
query, rotated to the distance at which the sinks are to be seen).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from swiftjax.kernels.quantized_pages import Pages, QuantizedPages, quantize_heads
from swiftjax.kernels.streams import Streams


def decode_attention(
    q: Float[Array, "B N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    context_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int = 0,
    streams: Streams | None = None,
) -> Float[Array, "B N H"]:
    """Attend from the last token of each sequence; a row with context_len 0 gives zeros."""
    return ragged_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        jnp.arange(q.shape[0] + 1, dtype=jnp.int32),
        context_lens,
        scale=scale,
        window=window,
        streams=streams,
    )


def ragged_attention(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    query_starts: Int32[Array, " B+1"],
    context_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int = 0,
    streams: Streams | None = None,
) -> Float[Array, "T N H"]:
    """Attend from the last `query_starts[b+1] - query_starts[b]` tokens of every sequence b.

    Rows from `query_starts[B]` on are padding and give zeros.
    """

    def one_token(t: Int32[Array, ""]) -> Float[Array, "N H"]:
        b = jnp.searchsorted(query_starts, t, side="right").astype(jnp.int32) - 1
        b = jnp.minimum(b, context_lens.shape[0] - 1)
        # The sequence's new tokens are its last ones: count the position back from its end.
        position = context_lens[b] - (query_starts[b + 1] - t)
        keys, values = gather(k_pages, page_table[b]), gather(v_pages, page_table[b])
        key_position = jnp.arange(keys.shape[0], dtype=jnp.int32)
        allowed = key_position <= position
        scores = score(q[t], keys) * scale
        if window:
            allowed &= key_position > position - window
        if streams is not None:
            is_sink = key_position < streams.sink_lens[b]
            allowed &= (key_position > position - streams.reach()[b]) | is_sink
            seen_from_there = score(streams.q_sink[t], keys) * scale
            scores = jnp.where(is_sink[None, :], seen_from_there, scores)
        allowed &= t < query_starts[-1]
        return weigh(scores, values, allowed).astype(q.dtype)

    return lax.map(one_token, jnp.arange(q.shape[0], dtype=jnp.int32))


def gather(pages: Pages, page_ids: Int32[Array, " M"]) -> Float[Array, "C K H"]:
    """Lay the pages of one sequence side by side, in token order, as float32."""
    _, num_kv_heads, _, head_dim = pages.shape
    if isinstance(pages, QuantizedPages):
        tokens = pages.values[page_ids].astype(jnp.float32) * pages.scales[page_ids][..., None]
    else:
        tokens = pages[page_ids].astype(jnp.float32)
    tokens = tokens.transpose(0, 2, 1, 3)
    return tokens.reshape(-1, num_kv_heads, head_dim)


def score(q: Float[Array, "N H"], keys: Float[Array, "C K H"]) -> Float[Array, "N C"]:
    """Multiply each query head with the keys of its KV head (N / K query heads share one)."""
    keys = jnp.repeat(keys, q.shape[0] // keys.shape[1], axis=1)
    return jnp.einsum("nh,cnh->nc", q.astype(jnp.float32), keys, precision=lax.Precision.HIGHEST)


def weigh(
    scores: Float[Array, "N C"], values: Float[Array, "C K H"], allowed: Bool[Array, " C"]
) -> Float[Array, "N H"]:
    """Average the values by the softmax over the allowed keys; zeros if there are none.

    Slots that are not allowed may hold anything, NaN included: they are replaced, not multiplied.
    """
    scores = jnp.where(allowed[None, :], scores, -jnp.inf)
    weights = jnp.where(allowed.any(), jax.nn.softmax(scores, axis=-1), 0.0)
    values = jnp.where(allowed[:, None, None], values, 0.0)
    values = jnp.repeat(values, scores.shape[0] // values.shape[1], axis=1)
    return jnp.einsum("nc,cnh->nh", weights, values, precision=lax.Precision.HIGHEST)


def write_kv(
    k_pages: Pages,
    v_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, " T"],
) -> tuple[Pages, Pages]:
    """Store token t at slot `slot_mapping[t]` = page * S + offset; drop slots from P * S on."""
    return _write(k_pages, k, slot_mapping), _write(v_pages, v, slot_mapping)


def _write(pages: Pages, x: Float[Array, "T K H"], slots: Int32[Array, " T"]) -> Pages:
    page, offset = jnp.divmod(slots, pages.shape[2])
    if not isinstance(pages, QuantizedPages):
        return pages.at[page, :, offset].set(x.astype(pages.dtype), mode="drop")
    values, scales = quantize_heads(x, pages.values.dtype)
    return QuantizedPages(
        pages.values.at[page, :, offset].set(values, mode="drop"),
        pages.scales.at[page, :, offset].set(scales, mode="drop"),
    )


def rope_write(
    k_pages: Pages,
    v_pages: Pages,
    qkv: Float[Array, "T X"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    slot_mapping: Int32[Array, " T"],
    *,
    q_norm: Float[Array, " H"] | None = None,
    k_norm: Float[Array, " H"] | None = None,
    eps: float = 0.0,
) -> tuple[Float[Array, "T N H"], Pages, Pages]:
    """Split query, key and value heads; normalise and rotate the first two; store the last two."""
    _, num_kv_heads, _, head_dim = k_pages.shape
    heads = qkv.reshape(qkv.shape[0], -1, head_dim)
    n = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads[:, :n], heads[:, n : n + num_kv_heads], heads[:, n + num_kv_heads :]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, *write_kv(k_pages, v_pages, k, v, slot_mapping)


def rotate(
    x: Float[Array, "T heads H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads H"]:
    """Rotate pair j = (x[j], x[j + H/2]) by its angle (Hugging Face order), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*rows D"]:
    """Divide the last axis by its root mean square, in float32, and scale it."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    factors = lax.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    return (wide * lax.rsqrt(mean_square + eps) * factors).astype(x.dtype)
