"""Splits a qkv projection: rotated queries to an array, rotated keys and values into their pages.

Called by the model once per layer, before that layer's attention. The op's meaning is
`reference.rope_write`. One kernel in place of four: on a GPU each of those costs a decode step more
in launching than in moving its bytes.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import _triton, reference
from swiftjax.kernels.implementation import (
    Implementation,
    check_supported,
    choose_implementation,
    runs_triton,
)
from swiftjax.kernels.page_refs import PageRefs, split_page_refs, store_pages
from swiftjax.kernels.paged_tile import Ref, pl_range
from swiftjax.kernels.quantized_pages import Pages, computed_dtype

MANY_TOKENS = 4096  # from which on the tile stays the same


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
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T N H"], Pages, Pages]:
    """Rotate and store; returns the queries and the pages with the new keys and values.

    `qkv` holds N query, K key and K value heads of width H side by side: X = (N + 2 K) H. Queries
    and keys are normalised first where `q_norm` and `k_norm` give the scales of an RMSNorm over H.
    Slots, donation and errors as in `write_kv`.
    """
    implementation = implementation or choose_implementation(jax.default_backend())
    _, num_kv_heads, page_size, head_dim = k_pages.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] % head_dim:
        raise ValueError(
            f"a projection of width {qkv.shape[1]} is not a whole number of heads of width "
            f"{head_dim}, {num_kv_heads} key and {num_kv_heads} value heads among them"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given together")
    check_supported(
        implementation,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=computed_dtype(k_pages, qkv),
    )
    arrays = (k_pages, v_pages, qkv, cos, sin, slot_mapping)
    run = rotate_rows if runs_triton(implementation) else reference.rope_write
    if implementation == "invariant" and q_norm is not None:
        # A norm's sum is added up in the order of the tile, which is to be the same for any number.
        config = choose_rope_config(
            num_tokens=MANY_TOKENS, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        run = partial(rotate_rows, config=config)
    return run(*arrays, q_norm=q_norm, k_norm=k_norm, eps=eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Tokens of one program, and its warps."""

    block_t: int
    num_warps: int


def choose_rope_config(*, num_tokens: int, num_kv_heads: int, head_dim: int) -> RopeConfig:
    """Pick enough programs for the chip, then tokens enough for 8 values a thread and load."""
    block_t = 1
    while block_t < 16 and num_tokens * num_kv_heads >= 256 * block_t:
        block_t *= 2
    half = _triton.power_of_two(head_dim // 2)
    return RopeConfig(block_t=block_t, num_warps=min(4, max(1, block_t * half // 256)))


def rotate_rows(
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
    config: RopeConfig | None = None,
) -> tuple[Float[Array, "T N H"], Pages, Pages]:
    """Run the Triton implementation; benchmarks pass a `config`."""
    num_tokens = qkv.shape[0]
    _, num_kv_heads, _, head_dim = k_pages.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    config = config or choose_rope_config(
        num_tokens=num_tokens, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    queries = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), qkv.dtype)
    pages, structure = jax.tree.flatten((k_pages, v_pages))
    norms = [] if q_norm is None or k_norm is None else [q_norm, k_norm]
    q, *written = _triton.launch(
        partial(_rope_kernel, block_t=config.block_t, eps=eps, num_pools=len(pages)),
        [*pages, qkv, cos, sin, slot_mapping, *norms],
        [queries, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages)],
        name="rope_write",
        grid=(num_kv_heads, -(-num_tokens // config.block_t)),
        knobs=_triton.Launch(num_warps=config.num_warps, num_stages=1),
        aliases={i: 1 + i for i in range(len(pages))},
    )
    return q, *jax.tree.unflatten(structure, written)


Halves = tuple[Array, Array]  # [tokens half] float32: the first and the second half of a head


def _rope_kernel(
    # Pages of keys and of values, the same memory as the outputs; qkv [T X], cos [T H/2], sin
    # [T H/2], slots [T]; [q_norm [H], k_norm [H]]; then q [T N H] and the pages again.
    *refs: Ref,
    block_t: int,
    eps: float,
    num_pools: int,
) -> None:
    """Grid (K, T / block_t): KV head with its query heads, block of tokens."""
    qkv_ref, cos_ref, sin_ref, slots_ref, *norm_refs, q_ref = refs[num_pools:-num_pools]
    k_out, v_out, _ = split_page_refs(refs[-num_pools:], quantized=num_pools > 2)
    num_tokens, num_heads, head_dim = q_ref.shape
    num_pages, num_kv_heads, page_size, _ = k_out.values.shape
    group, half = num_heads // num_kv_heads, head_dim // 2
    kv_head = pl.program_id(0)
    token = (pl.program_id(1) * block_t + pl_range(block_t))[:, None]
    column = pl_range(_triton.power_of_two(half))[None, :]
    mask = (token < num_tokens) & (column < half)
    past_the_end = num_pages * page_size
    slot = _triton.load(slots_ref.at[token], mask=token < num_tokens, other=past_the_end)
    page = lax.div(slot, jnp.int32(page_size))
    offset = slot - page * page_size
    cos, sin = (
        _triton.load(ref.at[token, column], mask=mask, other=0) for ref in (cos_ref, sin_ref)
    )

    def head_at(head: Array) -> Halves:
        first = head * head_dim + column
        load = partial(_triton.load, mask=mask, other=0)
        x, y = load(qkv_ref.at[token, first]), load(qkv_ref.at[token, first + half])
        return x.astype(jnp.float32), y.astype(jnp.float32)

    def turned(x: Halves, norm: int) -> Halves:
        first, second = x if not norm_refs else _normalised(x, norm_refs[norm], qkv_ref.dtype, eps)
        return first * cos - second * sin, second * cos + first * sin

    def put(pages: PageRefs, place: tuple[Array, ...], x: Halves, stored: Array) -> None:
        # Through the projection's dtype: pages of another one must not see more digits.
        parts = [
            (rows.astype(qkv_ref.dtype), columns, mask & stored)
            for rows, columns in zip(x, (column, column + half), strict=True)
        ]
        store_pages(pages, place, parts, stored)

    for i in range(group):
        head = kv_head * group + i
        put(PageRefs(q_ref, None), (token, head), turned(head_at(head), 0), token < num_tokens)
    place, stored = (page, kv_head, offset), slot < past_the_end
    put(k_out, place, turned(head_at(num_heads + kv_head), 1), stored)
    put(v_out, place, head_at(num_heads + num_kv_heads + kv_head), stored)


def _normalised(x: Halves, scale_ref: Ref, dtype: jnp.dtype, eps: float) -> Halves:
    """RMSNorm over both halves of each head, rounded to `dtype` as the reference does."""
    half = scale_ref.shape[0] // 2
    column = pl_range(x[0].shape[1])
    total = sum((part * part).sum(axis=1) for part in x)
    factor = lax.rsqrt(total / (2 * half) + eps)[:, None]
    scales = (
        _triton.load(scale_ref.at[at], mask=column < half, other=0).astype(jnp.float32)[None, :]
        for at in (column, column + half)
    )
    first, second = (
        (part * factor * scale).astype(dtype).astype(jnp.float32)
        for part, scale in zip(x, scales, strict=True)
    )
    return first, second
