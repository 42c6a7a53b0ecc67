"""The portable attention: plain jax, fast on a CPU, the fallback everywhere else.

One function, `attend`, walks the pages of a group of queries in trips of a few hundred tokens with
an online softmax; its trip counts are traced, so that nothing is compiled per context length.
Decode calls it once for all sequences, ragged attention once for all that have one new token and
once per query block of the others. Letters as in `reference.py`; X is the number of query rows per
sequence and KV head.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from swiftjax.kernels.quantized_pages import Pages, QuantizedPages
from swiftjax.kernels.query_blocks import query_blocks
from swiftjax.kernels.streams import Streams
from swiftjax.kernels.xla_mask import Mask, make_mask, plan_trips, visible

TOKENS_PER_TRIP = 128  # keys and values of a trip stay in a core's L2: 256 cost a step 5 % more
# Everything here is float32, and a GPU's default product of float32 keeps 10 bits of each factor.
product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
LOWEST_PEAK = -1e20  # below every real score, far above MASKED
MASKED = -1e30  # finite: the difference of two masked scores must not be NaN


class Softmax(NamedTuple):
    """Running state of the online softmax, float32."""

    out: Float[Array, "B K X H"]
    peak: Float[Array, "B K X"]
    total: Float[Array, "B K X"]


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
    """Attend for all sequences together, with as many trips as the longest context needs."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[1]
    group = num_heads // num_kv_heads

    def rows(x: Float[Array, "B N H"]) -> Float[Array, "B K G H"]:
        return x.astype(jnp.float32).reshape(num_seqs, num_kv_heads, group, head_dim) * scale

    out = attend(
        rows(q),
        None if streams is None else rows(streams.q_sink),
        jnp.broadcast_to(context_lens[:, None] - 1, (num_seqs, group)),
        k_pages,
        v_pages,
        page_table,
        make_mask(window, streams),
    )
    return out.reshape(q.shape).astype(q.dtype)


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
    row_invariant: bool = False,
) -> Float[Array, "T N H"]:
    """Attend for one query block after the other, then for all single tokens together.

    Each block has its own trips; spares never run. A single token would cost a whole block, which
    is what it does if `row_invariant`, as products of other shapes round otherwise.
    """
    num_tokens, num_kv_heads = q.shape[0], k_pages.shape[1]
    block_q = choose_block_q(num_tokens, context_lens.shape[0])
    min_new = 1 if row_invariant else 2
    blocks = query_blocks(query_starts, context_lens, num_tokens, block_q, min_new)

    def one_block(i: Int32[Array, ""], out: Float[Array, "padded N H"]) -> Array:
        first, offsets = blocks.first[i], jnp.arange(block_q, dtype=jnp.int32)
        positions = jnp.where(first + offsets < blocks.end[i], blocks.position[i] + offsets, -1)
        rows = partial(block_rows, first=first, block_q=block_q, num_kv_heads=num_kv_heads)
        block = attend(
            rows(padded_q) * scale,
            None if padded_sink is None else rows(padded_sink) * scale,
            jnp.repeat(positions, q.shape[1] // num_kv_heads)[None],
            k_pages,
            v_pages,
            lax.dynamic_slice_in_dim(page_table, blocks.sequence[i], 1),
            mask.of(blocks.sequence[i]),
        )
        block = block.reshape(num_kv_heads, block_q, -1, q.shape[2]).transpose(1, 0, 2, 3)
        block = block.reshape(block_q, *q.shape[1:]).astype(out.dtype)
        # Rows past the sequence's end are zeros here; the next block, in token order, fills them.
        return lax.dynamic_update_slice_in_dim(out, block, first, 0)

    padding = ((0, block_q), (0, 0), (0, 0))
    padded_q = jnp.pad(q, padding)
    padded_sink = None if streams is None else jnp.pad(streams.q_sink, padding)
    mask = make_mask(window, streams)
    out = lax.fori_loop(0, blocks.count, one_block, jnp.zeros_like(padded_q))[:num_tokens]
    if row_invariant:
        return out
    is_single = jnp.diff(query_starts) == 1
    singles = jnp.where(is_single, query_starts[:-1], num_tokens)
    decoded = decode_attention(
        jnp.take(q, singles, axis=0, mode="clip"),
        k_pages,
        v_pages,
        page_table,
        jnp.where(is_single, context_lens, 0),
        scale=scale,
        window=window,
        streams=streams
        and streams._replace(q_sink=jnp.take(streams.q_sink, singles, axis=0, mode="clip")),
    )
    return out.at[singles].set(decoded, mode="drop")


def block_rows(
    x: Float[Array, "padded N H"], first: Int32[Array, ""], block_q: int, num_kv_heads: int
) -> Float[Array, "1 K X H"]:
    """Take the queries of a block, in float32, grouped by KV head."""
    block = lax.dynamic_slice_in_dim(x, first, block_q).astype(jnp.float32)
    block = block.reshape(block_q, num_kv_heads, -1, x.shape[2]).transpose(1, 0, 2, 3)
    return block.reshape(1, num_kv_heads, -1, x.shape[2])


def choose_block_q(num_tokens: int, num_seqs: int) -> int:
    """Tokens per query block: up to twice the mean chunk, between 8 (decode rows) and 128."""
    block_q = 8
    while block_q < 128 and block_q * num_seqs < 2 * num_tokens:
        block_q *= 2
    return block_q


def attend(
    q: Float[Array, "B K X H"],
    q_sink: Float[Array, "B K X H"] | None,
    positions: Int32[Array, "B X"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    mask: Mask,
) -> Float[Array, "B K X H"]:
    """Attend from scaled query rows; a row at position -1 gives zeros."""
    page_size, max_pages = k_pages.shape[2], page_table.shape[1]
    num_pages = min(max(1, TOKENS_PER_TRIP // page_size), max_pages)
    last = positions.max(axis=1)
    lowest = jnp.where(positions < 0, last[:, None], positions).min(axis=1)
    sink_trips, first_trip, num_trips = plan_trips(lowest, last, mask, num_pages * page_size)

    def body(i: Int32[Array, ""], state: Softmax) -> Softmax:
        start = jnp.where(i < sink_trips, i, first_trip + (i - sink_trips)) * num_pages
        pages = start[:, None] + jnp.arange(num_pages, dtype=jnp.int32)[None]
        page_ids = jnp.take_along_axis(page_table, jnp.minimum(pages, max_pages - 1), axis=1)
        keys, values = gather(k_pages, page_ids), gather(v_pages, page_ids)
        offsets = jnp.arange(num_pages * page_size, dtype=jnp.int32)
        key_positions = start[:, None] * page_size + offsets[None]
        scores = product("bkxh,bkch->bkxc", q, keys)
        if q_sink is not None:
            is_sink = (key_positions < mask.spread(1).sink_len)[:, None, None, :]
            scores = jnp.where(is_sink, product("bkxh,bkch->bkxc", q_sink, keys), scores)
        # Slots that no query may see can hold NaN, and 0 * NaN is NaN.
        seen = visible(key_positions, lowest[:, None], last[:, None], mask.spread(1))
        values = jnp.where(seen[:, None, :, None], values, 0.0)
        queries = positions[:, :, None]
        allowed = visible(key_positions[:, None, :], queries, queries, mask.spread(2))
        return accumulate(state, scores, allowed, values)

    zeros = jnp.zeros(q.shape[:3], jnp.float32)
    state = Softmax(jnp.zeros(q.shape, jnp.float32), zeros + LOWEST_PEAK, zeros)
    state = lax.fori_loop(0, num_trips, body, state)
    return state.out / jnp.where(state.total > 0, state.total, 1.0)[..., None]


def accumulate(
    state: Softmax,
    scores: Float[Array, "B K X C"],
    allowed: Bool[Array, "B X C"],
    values: Float[Array, "B K C H"],
) -> Softmax:
    """Take one trip's keys into the online softmax."""
    scores = jnp.where(allowed[:, None], scores, MASKED)
    peak = jnp.maximum(state.peak, scores.max(axis=-1))
    weights = jnp.exp(scores - peak[..., None])  # exactly 0 where masked, as peak >= LOWEST_PEAK
    shrink = jnp.exp(state.peak - peak)
    out = product("bkxc,bkch->bkxh", weights, values)
    return Softmax(
        state.out * shrink[..., None] + out, peak, state.total * shrink + weights.sum(axis=-1)
    )


def gather(pages: Pages, page_ids: Int32[Array, "B pages"]) -> Float[Array, "B K C H"]:
    """Copy the named pages side by side, as float32."""
    if isinstance(pages, QuantizedPages):
        scales = _gather(pages.scales[..., None], page_ids)
        return _gather(pages.values, page_ids) * scales
    return _gather(pages, page_ids)


def _gather(
    pages: Num[Array, "P K S W"], page_ids: Int32[Array, "B pages"]
) -> Float[Array, "B K C W"]:
    num_seqs, num_pages = page_ids.shape
    pool, num_kv_heads, page_size, head_dim = pages.shape
    # Rows of (page, head) come out in the order that the dots need: no second, transposing copy.
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    rows = page_ids[:, None, :] * num_kv_heads + heads[None, :, None]
    flat = pages.reshape(pool * num_kv_heads, page_size * head_dim)
    block = jnp.take(flat, rows, axis=0, mode="clip").astype(jnp.float32)
    return block.reshape(num_seqs, num_kv_heads, num_pages * page_size, head_dim)
