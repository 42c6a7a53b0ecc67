"""Random paged attention problems with an independent answer: dense numpy float64, no pages.

A case is described by how many cached and new tokens each sequence has. Keys and values are drawn
per sequence, answered densely, and only then scattered over a permuted page table whose unused
slots hold NaN.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from swiftjax.kernels import Streams


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is asked: sequences as (cached, new) token counts, and the model's numbers."""

    sequences: tuple[tuple[int, int], ...]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    page_size: int = 16
    padding: int = 0  # rows of q after the last sequence
    spare_pages: int = 3  # columns of the page table beyond the longest context
    window: int = 0
    streams: tuple[tuple[int, int], ...] = ()  # (sinks, window) of each sequence; window 0: all
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCase:
    """Arguments of `ragged_attention` and the float64 answer."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    query_starts: jax.Array
    context_lens: jax.Array
    options: dict[str, object] = field(default_factory=dict)
    expected: np.ndarray


def make_case(shape: Shape, seed: int = 0) -> AttentionCase:
    """Draw a case; every number an op may read is finite, everything else NaN."""
    rng = np.random.default_rng(seed)
    contexts = [cached + new for cached, new in shape.sequences]
    starts = np.concatenate([[0], np.cumsum([new for _, new in shape.sequences])])
    num_tokens = int(starts[-1]) + shape.padding
    num_heads = shape.num_kv_heads * shape.group
    scale = shape.head_dim**-0.5
    draw = _drawer(rng, shape.dtype)
    q = draw((num_tokens, num_heads, shape.head_dim))
    q_sink = draw((num_tokens, num_heads, shape.head_dim)) if shape.streams else None
    max_pages = -(-max(1, *contexts) // shape.page_size) + shape.spare_pages
    num_pages = len(contexts) * max_pages + 1
    pool = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    k_pages, v_pages = np.full(pool, np.nan), np.full(pool, np.nan)
    # Page 0 stays NaN: the table's padding names it.
    ids = rng.permutation(np.arange(1, num_pages)).reshape(len(contexts), max_pages)
    table = np.zeros((len(contexts), max_pages), np.int32)
    expected = np.zeros(q.shape)
    for b, (context, (_, new)) in enumerate(zip(contexts, shape.sequences, strict=True)):
        keys = draw((context, shape.num_kv_heads, shape.head_dim))
        values = draw((context, shape.num_kv_heads, shape.head_dim))
        used = -(-context // shape.page_size)
        table[b, :used] = ids[b, :used]
        for t in range(context):
            page, offset = table[b, t // shape.page_size], t % shape.page_size
            k_pages[page, :, offset], v_pages[page, :, offset] = keys[t], values[t]
        for t in range(new):
            row, position = starts[b] + t, context - new + t
            sink = None if q_sink is None else q_sink[row]
            limits = shape.streams[b] if shape.streams else (0, shape.window)
            expected[row] = _attend(q[row], sink, keys, values, position, scale, limits)
    return AttentionCase(
        q=jnp.asarray(q, shape.dtype),
        k_pages=jnp.asarray(k_pages, shape.dtype),
        v_pages=jnp.asarray(v_pages, shape.dtype),
        page_table=jnp.asarray(table),
        query_starts=jnp.asarray(starts, jnp.int32),
        context_lens=jnp.asarray(contexts, jnp.int32),
        options={
            "scale": scale,
            "window": shape.window,
            "streams": None if q_sink is None else _streams(q_sink, shape),
        },
        expected=expected,
    )


def _streams(q_sink: np.ndarray, shape: Shape) -> Streams:
    sinks, windows = np.asarray(shape.streams, np.int32).T
    return Streams(jnp.asarray(q_sink, shape.dtype), jnp.asarray(sinks), jnp.asarray(windows))


def relative_error(out: jax.Array, expected: np.ndarray) -> float:
    """||out - expected|| / ||expected|| in float64; infinite if anything is not finite."""
    values = np.asarray(out, np.float64)
    if not np.isfinite(values).all():
        return np.inf
    return float(np.linalg.norm(values - expected) / max(np.linalg.norm(expected), 1e-30))


def _drawer(rng: np.random.Generator, dtype: str):
    def draw(size: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(size).astype(jnp.dtype(dtype)).astype(np.float64)

    return draw


def _attend(
    q: np.ndarray,
    q_sink: np.ndarray | None,
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
    scale: float,
    limits: tuple[int, int],
) -> np.ndarray:
    sink_len, window = limits
    group = q.shape[0] // keys.shape[1]
    first = max(0, position - window + 1) if window else 0
    sinks = np.arange(min(sink_len, position + 1))
    near = np.arange(max(first, len(sinks)), position + 1)
    out = np.empty(q.shape)
    for n in range(q.shape[0]):
        k, v = keys[:, n // group], values[:, n // group]
        scores = k[near] @ q[n]
        if q_sink is not None:
            scores = np.concatenate([k[sinks] @ q_sink[n], scores])
        weights = np.exp((scores - scores.max()) * scale)
        out[n] = weights @ v[np.concatenate([sinks, near])] / weights.sum()
    return out
