"""Paged decode attention: one new token per sequence over its whole cached context.

Called by the model in steps where every sequence has exactly one new token; `split_decode` also by
`single_tokens.py`. The op's meaning is `reference.decode_attention`. The GPU kernel splits every
context over several programs (split-KV, as in flash-decoding) when there are too few sequences to
fill the chip; a second kernel combines.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import _triton, reference, xla_attention
from swiftjax.kernels.implementation import Implementation, check_attention, choose_implementation
from swiftjax.kernels.page_refs import load_pages, split_page_refs, value_dtype
from swiftjax.kernels.paged_tile import (
    Keys,
    Ref,
    Softmax,
    accumulate,
    empty_softmax,
    load_rows,
    normalise,
    pl_range,
    score,
    store_rows,
    walk,
)
from swiftjax.kernels.quantized_pages import Pages, QuantizedPages, page_arrays
from swiftjax.kernels.streams import Streams, stream_arrays
from swiftjax.kernels.trips import Sight, Tile, make_tile, split_ranges, trip_ranges, visible


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
    implementation: Implementation | None = None,
) -> Float[Array, "B N H"]:
    """Attend from the last token of each sequence; a row with context_len 0 gives zeros.

    `window` counts tokens, the query's own included, 0 meaning all; `streams` gives every sequence
    a window and sinks of its own. Slots at or past context_len may hold anything. Raises ValueError
    for arguments that do not fit together, NotImplementedError for shapes that the implementation
    lacks.
    """
    implementation = implementation or choose_implementation(jax.default_backend())
    check_attention(q, k_pages, window, streams, implementation)
    arrays = (q, k_pages, v_pages, page_table, context_lens)
    if implementation == "reference":
        return reference.decode_attention(*arrays, scale=scale, window=window, streams=streams)
    if implementation == "xla":
        return xla_attention.decode_attention(*arrays, scale=scale, window=window, streams=streams)
    return split_decode(*arrays, scale=scale, window=window, streams=streams)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """Tile sizes: keys per trip, programs per (sequence, KV head), and the launch."""

    block_k: int
    num_splits: int
    launch: _triton.Launch


def choose_decode_config(
    *,
    num_seqs: int,
    num_kv_heads: int,
    max_context: int,
    page_size: int,
    width: int,
    itemsize: int,
    rotations: int = 1,
) -> DecodeConfig:
    """Pick tile sizes, and splits enough to give every multiprocessor about four programs.

    The numbers are those of one H200 (132 multiprocessors); benchmarks/NOTES.md has the trials.
    """
    size = _triton.fit_shared_memory(
        _triton.TileSize(16, min(64, max(32, page_size)), 2),
        width=width,
        itemsize=itemsize,
        min_rows=16,
        rotations=rotations,
    )
    wanted = 512 // (num_seqs * num_kv_heads)
    # A split of less than two trips only adds work to the combination.
    num_splits = max(1, min(wanted, 64, max_context // (2 * size.block_k)))
    return DecodeConfig(
        block_k=size.block_k,
        num_splits=num_splits,
        launch=_triton.Launch(num_warps=2, num_stages=size.num_stages),
    )


def split_decode(
    q: Float[Array, "B N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    context_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int,
    streams: Streams | None,
    config: DecodeConfig | None = None,
) -> Float[Array, "B N H"]:
    """Run the Triton implementation; benchmarks pass a `config`."""
    num_seqs, _, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    config = config or choose_decode_config(
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        max_context=page_table.shape[1] * page_size,
        page_size=page_size,
        width=_triton.power_of_two(head_dim),
        itemsize=q.dtype.itemsize,
        rotations=1 if streams is None else 2,
    )
    tile = make_tile(k_pages, config.block_k, scale=scale, window=window)
    return _launch_splits(
        q, k_pages, v_pages, page_table, context_lens, streams, tile=tile, config=config
    )


def _launch_splits(
    q: Float[Array, "B N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    context_lens: Int32[Array, " B"],
    streams: Streams | None,
    *,
    tile: Tile,
    config: DecodeConfig,
) -> Float[Array, "B N H"]:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, splits = k_pages.shape[1], config.num_splits
    rows = (num_seqs, num_heads, splits)
    partials = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*rows, head_dim), rows, rows)]
    whole = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    group = num_heads // num_kv_heads
    pages = [*page_arrays(k_pages), *page_arrays(v_pages)]
    outputs = _triton.launch(
        partial(
            _decode_kernel,
            tile=tile,
            group=group,
            num_splits=splits,
            quantized=isinstance(k_pages, QuantizedPages),
            streams=streams is not None,
        ),
        [q, page_table, context_lens, *pages, *stream_arrays(streams)],
        whole if splits == 1 else partials,
        name="decode_attention",
        grid=(num_kv_heads, num_seqs, splits),
        knobs=config.launch,
    )
    if splits == 1:
        return outputs[0]
    return _triton.launch(
        partial(_combine_kernel, tile=tile, num_splits=splits),
        outputs,
        whole,
        name="decode_attention_combine",
        grid=(num_heads, num_seqs),
        knobs=_triton.Launch(num_warps=2, num_stages=1),
    )[0]


def _decode_kernel(
    q_ref: Ref,  # [B N H]
    table_ref: Ref,  # [B M]
    lens_ref: Ref,  # [B]
    # Pages of keys, of values; of Streams, where given: q_sink [B N H], sink_lens [B], reach [B].
    # Then [out [B N H]], or partial out [B N Z H], peak, total.
    *refs: Ref,
    tile: Tile,
    group: int,
    num_splits: int,
    quantized: bool,
    streams: bool,
) -> None:
    """Grid (K, B, Z): KV head, sequence, split. The query heads of a group are the tile's rows."""
    head, seq, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    k_pages, v_pages, refs = split_page_refs(refs, quantized)
    row = pl_range(16)  # what tensor cores need; surplus rows hold zeros and are not stored
    live, heads = row < group, head * group + row
    position = lens_ref[seq] - 1
    q = load_rows(q_ref, (seq, heads), live, tile)
    q_sink = load_rows(refs[0], (seq, heads), live, tile) if streams else None
    sight = Sight(refs[2][seq], refs[1][seq]) if streams else Sight(tile.window)

    def visit(keys: Keys, state: Softmax, masked: bool) -> Softmax:
        seen = visible(keys.position, position, position, sight) if masked else None
        k, k_scale = load_pages(k_pages, keys, head, seen, tile, q.dtype)
        v, v_scale = load_pages(v_pages, keys, head, seen, tile, value_dtype(q.dtype))
        scores = score(q, q_sink, k, k_scale, keys, sight)
        allowed = None if seen is None else jnp.broadcast_to(seen[None, :], scores.shape)
        return accumulate(state, scores, allowed, v, v_scale, tile)

    trips = trip_ranges(position, position, sight, tile.block_k)
    ranges = split_ranges(trips, split, num_splits)
    state = empty_softmax(row.shape[0], tile.width)
    state = walk(ranges, table_ref, seq, position, tile, visit, state)
    if num_splits == 1:
        store_rows(refs[-1], (seq, heads), normalise(state), live, tile)
        return
    out_ref, peak_ref, total_ref = refs[-3:]
    store_rows(out_ref, (seq, heads, split), state.out, live, tile)
    _triton.store(peak_ref.at[seq, heads, split], state.peak, mask=live)
    _triton.store(total_ref.at[seq, heads, split], state.total, mask=live)


def _combine_kernel(
    part_ref: Ref,  # [B N Z H] float32, not normalised
    peak_ref: Ref,  # [B N Z]
    total_ref: Ref,  # [B N Z]
    out_ref: Ref,  # [B N H]
    *,
    tile: Tile,
    num_splits: int,
) -> None:
    """Grid (N, B): query head, sequence. A split without keys has peak MASKED and total 0."""
    head, seq = pl.program_id(0), pl.program_id(1)
    split = pl_range(_triton.power_of_two(num_splits))
    live = split < num_splits
    peaks = _triton.load(peak_ref.at[seq, head, split], mask=live, other=-jnp.inf)
    totals = _triton.load(total_ref.at[seq, head, split], mask=live, other=0)
    weights = jnp.exp2(peaks - peaks.max(axis=0))
    parts = load_rows(part_ref, (seq, head, split), live, tile)
    total = (weights * totals).sum(axis=0)
    out = (weights[:, None] * parts).sum(axis=0) / jnp.where(total > 0, total, 1.0)
    columns = pl_range(tile.width)
    mask = columns < tile.head_dim
    _triton.store(out_ref.at[seq, head, columns], out.astype(out_ref.dtype), mask=mask)
