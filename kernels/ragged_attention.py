"""Paged attention for ragged batches: prefill chunks and decodes mixed, each with its own context.

Called by the model in every step that is not decode-only, after the step's own keys and values were
written to the pages. The op's meaning is `reference.ragged_attention`. On the GPU one program
serves a block of query tokens of one sequence for all query heads of one KV head.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int32

from swiftjax.kernels import _triton, reference, xla_attention
from swiftjax.kernels.chunk_attention import can_attend_chunks, chunk_attention
from swiftjax.kernels.chunk_work import BLOCK_Q, MIN_CHUNK, TILE_ROWS
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
from swiftjax.kernels.prompt_attention import check_prompt_attention, prompt_attention
from swiftjax.kernels.quantized_pages import Pages, QuantizedPages, page_arrays
from swiftjax.kernels.query_blocks import query_blocks
from swiftjax.kernels.single_tokens import attend_single_tokens
from swiftjax.kernels.streams import Streams, stream_arrays
from swiftjax.kernels.trips import Sight, Tile, make_tile, trip_ranges, visible


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
    whole_prompt: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "T N H"]:
    """Attend causally from the last query_starts[b+1] - query_starts[b] tokens of every sequence b.

    `query_starts` rises from 0; rows from `query_starts[B]` on are padding and give zeros, and a
    sequence may have no new tokens at all. `window`, `streams` and the errors are those of
    `decode_attention`. With `row_invariant` a token's bits depend on its context only, not on how
    many others of its sequence are new; "xla" is slower for it, the others always are so, and
    "mosaic" is then what "triton" is.
    `whole_prompt` promises that the first sequence alone has tokens and that all of them are new:
    a library may then compute it, for what `check_prompt_attention` lets pass.
    """
    implementation = implementation or choose_implementation(jax.default_backend())
    check_attention(q, k_pages, window, streams, implementation)
    arrays = (q, k_pages, v_pages, page_table, query_starts, context_lens)
    if implementation == "reference":
        return reference.ragged_attention(*arrays, scale=scale, window=window, streams=streams)
    if whole_prompt:
        check_prompt_attention(
            head_dim=q.shape[2],
            dtype=q.dtype,
            window=window,
            has_streams=streams is not None,
            is_quantized=isinstance(k_pages, QuantizedPages),
        )
        return prompt_attention(q, k_pages, v_pages, page_table, context_lens, scale=scale)
    if implementation == "xla":
        return xla_attention.ragged_attention(
            *arrays, scale=scale, window=window, streams=streams, row_invariant=row_invariant
        )
    # Bits differ between the kernels; which one a token meets depends on its chunk and its row.
    if implementation == "mosaic" and not row_invariant and can_attend_chunks(q, k_pages, streams):
        return _attend_by_length(*arrays, scale=scale, window=window)
    return block_attention(
        *arrays, scale=scale, window=window, streams=streams, row_invariant=row_invariant
    )


def _attend_by_length(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    query_starts: Int32[Array, " B+1"],
    context_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int,
) -> Float[Array, "T N H"]:
    """Long chunks by Mosaic's kernel, single tokens by that of decode steps, others by Triton's."""
    arrays = (q, k_pages, v_pages, page_table, query_starts, context_lens)
    blocks = query_blocks(
        query_starts, context_lens, q.shape[0], BLOCK_Q, min_new=MIN_CHUNK, align=TILE_ROWS
    )
    others = chunk_attention(*arrays[:4], blocks, scale=scale, window=window)
    others, is_done = attend_single_tokens(*arrays, others, scale=scale, window=window)
    return block_attention(
        *arrays,
        scale=scale,
        window=window,
        streams=None,
        max_new=MIN_CHUNK - 1,
        left_out=is_done,
        others=others,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedConfig:
    """Tile sizes: query rows (tokens times query heads of a group), keys per trip, the launch."""

    rows: int
    block_k: int
    launch: _triton.Launch


def choose_ragged_config(
    *,
    num_tokens: int,
    num_seqs: int,
    group: int,
    width: int,
    itemsize: int,
    rotations: int = 1,
    row_invariant: bool = False,
) -> RaggedConfig:
    """Pick tile sizes: large query blocks only where the mean chunk is long, and rows may differ.

    The numbers are those of one H200; benchmarks/NOTES.md has the trials.
    """
    long = num_tokens >= 1024 * num_seqs and not row_invariant
    size = _triton.fit_shared_memory(
        _triton.TileSize(128, 64, 2) if long else _triton.TileSize(64, 64, 3),
        width=width,
        itemsize=itemsize,
        min_rows=group,
        rotations=rotations,
    )
    return RaggedConfig(
        rows=size.rows,
        block_k=size.block_k,
        launch=_triton.Launch(num_warps=4 if width <= 128 else 8, num_stages=size.num_stages),
    )


def block_attention(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    query_starts: Int32[Array, " B+1"],
    context_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int,
    streams: Streams | None,
    max_new: int | None = None,
    left_out: Bool[Array, " B"] | None = None,
    others: Float[Array, "T N H"] | None = None,
    row_invariant: bool = False,
    config: RaggedConfig | None = None,
) -> Float[Array, "T N H"]:
    """Run the Triton implementation; benchmarks pass a `config`.

    Sequences with more than `max_new` new tokens are left out, and those of `left_out`; their rows
    are those of `others`.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[1]
    group = num_heads // num_kv_heads
    padded_group = _triton.power_of_two(group)
    config = config or choose_ragged_config(
        num_tokens=num_tokens,
        num_seqs=context_lens.shape[0],
        group=padded_group,
        width=_triton.power_of_two(head_dim),
        itemsize=q.dtype.itemsize,
        rotations=1 if streams is None else 2,
        row_invariant=row_invariant,
    )
    tile = make_tile(k_pages, config.block_k, scale=scale, window=window)
    blocks = query_blocks(
        query_starts,
        context_lens,
        num_tokens,
        config.rows // padded_group,
        max_new=max_new,
        left_out=left_out,
    )
    one_sequence = context_lens.shape[0] == 1
    pages = [*page_arrays(k_pages), *page_arrays(v_pages)]
    arguments = [q, page_table, *blocks[:4], *pages, *stream_arrays(streams)]
    return _triton.launch(
        partial(
            _ragged_kernel,
            tile=tile,
            group=group,
            rows=config.rows,
            one_sequence=one_sequence,
            quantized=isinstance(k_pages, QuantizedPages),
            streams=streams is not None,
        ),
        arguments if others is None else [*arguments, others],
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        name="ragged_attention",
        grid=(num_kv_heads, blocks.first.shape[0]),
        knobs=config.launch,
        aliases=None if others is None else {len(arguments): 0},
    )[0]


def _ragged_kernel(
    q_ref: Ref,  # [T N H]
    table_ref: Ref,  # [B M]
    sequence_ref: Ref,  # [blocks], as the next three: see QueryBlocks
    first_ref: Ref,
    end_ref: Ref,
    position_ref: Ref,
    # Pages of keys, of values; of Streams, where given: q_sink [T N H], sink_lens [B], reach [B].
    # Then, where there are others, what they got; out [T N H], the same memory then, comes last.
    *refs: Ref,
    tile: Tile,
    group: int,
    rows: int,
    one_sequence: bool,
    quantized: bool,
    streams: bool,
) -> None:
    """Grid (K, blocks): KV head, query block. Rows are tokens times the group's query heads."""
    k_pages, v_pages, refs = split_page_refs(refs, quantized)
    head = pl.program_id(0)
    block = block_of_program(pl.program_id(1), pl.num_programs(1), one_sequence)
    seq, first, end = (ref[block] for ref in (sequence_ref, first_ref, end_ref))
    padded_group = jnp.int32(_triton.power_of_two(group))
    token = first + lax.div(pl_range(rows), padded_group)
    member = lax.rem(pl_range(rows), padded_group)
    live, index = (token < end) & (member < group), (token, head * group + member)
    lowest = position_ref[block]
    last, position = lowest + end - first - 1, lowest + token - first
    q = load_rows(q_ref, index, live, tile)
    q_sink, sight = None, Sight(tile.window)
    if streams:
        owner = jnp.minimum(seq, table_ref.shape[0] - 1)  # the padding's blocks have none
        q_sink = load_rows(refs[0], index, live, tile)
        sight = Sight(refs[2][owner], refs[1][owner])

    def visit(keys: Keys, state: Softmax, masked: bool) -> Softmax:
        seen = visible(keys.position, lowest, last, sight) if masked else None
        k, k_scale = load_pages(k_pages, keys, head, seen, tile, q.dtype)
        v, v_scale = load_pages(v_pages, keys, head, seen, tile, value_dtype(q.dtype))
        scores = score(q, q_sink, k, k_scale, keys, sight)
        queries = position[:, None]
        allowed = visible(keys.position[None, :], queries, queries, sight) if masked else None
        return accumulate(state, scores, allowed, v, v_scale, tile)

    state = empty_softmax(rows, tile.width)
    ranges = trip_ranges(lowest, last, sight, tile.block_k)
    state = walk(ranges, table_ref, seq, last, tile, visit, state)
    store_rows(refs[-1], index, normalise(state), live, tile)


def block_of_program(program: Any, num_programs: Any, one_sequence: bool) -> Any:
    """Choose the order in which blocks start.

    Later blocks of a prompt see more keys and start first, so that the last programs are short. In
    a mixed batch every other program comes from the front, where the decodes usually are: they wait
    for memory while the chunk's blocks keep the tensor cores busy.
    """
    if one_sequence:
        return num_programs - 1 - program
    half = lax.div(program, jnp.int32(2))
    return jnp.where(lax.rem(program, jnp.int32(2)) == 0, num_programs - 1 - half, half)
