"""Writes the keys and values of new tokens into their pages, in place when the pages are donated.

For keys that need no rotation; the model calls `rope_write`, which does both at once. The op's
meaning is `reference.write_kv`.
"""

from functools import partial

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import _triton, reference
from swiftjax.kernels.implementation import (
    Implementation,
    check_supported,
    choose_implementation,
    runs_triton,
)
from swiftjax.kernels.page_refs import split_page_refs, store_pages
from swiftjax.kernels.paged_tile import Ref, pl_range
from swiftjax.kernels.quantized_pages import Pages, computed_dtype


def write_kv(
    k_pages: Pages,
    v_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, " T"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Pages, Pages]:
    """Store token t at slot `slot_mapping[t]` = page * S + offset; drop a slot of P * S.

    No two tokens may name the same slot. The caller donates the pages and rebinds both results;
    without donation the whole pool is copied. Errors as in `decode_attention`.
    """
    implementation = implementation or choose_implementation(jax.default_backend())
    check_supported(
        implementation,
        num_heads=k.shape[1],
        num_kv_heads=k_pages.shape[1],
        head_dim=k.shape[2],
        page_size=k_pages.shape[2],
        dtype=computed_dtype(k_pages, k),
    )
    if runs_triton(implementation):
        return scatter_rows(k_pages, v_pages, k, v, slot_mapping)
    return reference.write_kv(k_pages, v_pages, k, v, slot_mapping)


def scatter_rows(
    k_pages: Pages,
    v_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, " T"],
    *,
    block_t: int = 16,
    num_warps: int = 1,
) -> tuple[Pages, Pages]:
    """Run the Triton implementation; benchmarks pass tokens and warps per program."""
    num_tokens, num_kv_heads, _ = k.shape
    block_t = min(block_t, _triton.power_of_two(num_tokens))
    pages, structure = jax.tree.flatten((k_pages, v_pages))
    written = _triton.launch(
        partial(_write_kernel, block_t=block_t, quantized=len(pages) > 2),
        [k, v, slot_mapping, *pages],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        name="write_kv",
        grid=(num_kv_heads, -(-num_tokens // block_t)),
        knobs=_triton.Launch(num_warps=num_warps, num_stages=1),
        aliases={3 + i: i for i in range(len(pages))},
    )
    return jax.tree.unflatten(structure, written)


def _write_kernel(
    k_ref: Ref,  # [T K H]
    v_ref: Ref,
    slots_ref: Ref,  # [T]
    *refs: Ref,  # the pages of keys and of values twice, as arguments and as outputs
    block_t: int,
    quantized: bool,
) -> None:
    """Grid (K, T / block_t): KV head, block of tokens."""
    k_out, v_out, _ = split_page_refs(refs[len(refs) // 2 :], quantized)
    num_tokens, _, head_dim = k_ref.shape
    num_pages, _, page_size, _ = k_out.values.shape
    head = pl.program_id(0)
    token = pl.program_id(1) * block_t + pl_range(block_t)
    past_the_end = num_pages * page_size
    slot = _triton.load(slots_ref.at[token], mask=token < num_tokens, other=past_the_end)
    page = slot // page_size
    column = pl_range(_triton.power_of_two(head_dim))[None, :]
    stored = (slot < past_the_end)[:, None]
    place = (page[:, None], head, (slot - page * page_size)[:, None])
    mask = stored & (column < head_dim)
    for source, target in ((k_ref, k_out), (v_ref, v_out)):
        rows = _triton.load(source.at[token[:, None], head, column], mask=mask, other=0)
        store_pages(target, place, [(rows, column, mask)], stored)
