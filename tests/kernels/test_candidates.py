"""Forms of the kernels that wait for a measurement are right before it: interpreted, on a CPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftjax.kernels import _triton, packed_int4
from swiftjax.kernels.decode_attention import choose_decode_config, split_decode
from swiftjax.kernels.int4_matmul import int4_tiles
from swiftjax.kernels.ragged_attention import RaggedConfig, block_attention
from swiftjax.kernels.split_k import MatmulTile
from tests.kernels.attention_case import make_case, relative_error
from tests.kernels.shapes import DECODES, RAGGED


def test_fused_ragged_attention_equals_dense() -> None:
    case = make_case(RAGGED["mixed"])
    config = RaggedConfig(
        rows=32, block_k=32, launch=_triton.Launch(num_warps=4, num_stages=2), fused=True
    )
    arrays = (case.q, case.k_pages, case.v_pages, case.page_table, case.query_starts)
    run = partial(block_attention, **case.options, config=config)
    assert relative_error(jax.jit(run)(*arrays, case.context_lens), case.expected) <= 1e-5


def test_fused_decode_attention_equals_dense() -> None:
    case = make_case(DECODES["lengths"])
    config = choose_decode_config(
        num_seqs=6, num_kv_heads=2, max_context=512, page_size=16, width=16, itemsize=4
    )
    arrays = (case.q, case.k_pages, case.v_pages, case.page_table, case.context_lens)
    run = partial(split_decode, **case.options, config=replace(config, fused=True))
    assert relative_error(jax.jit(run)(*arrays), case.expected) <= 1e-5


def test_fused_scales_of_int4_groups_change_nothing_but_rounding() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (48, 256)).astype(np.uint8)
    x = jnp.asarray(rng.standard_normal((5, 256)), jnp.float32)
    scale = jnp.asarray(rng.uniform(0.5, 2, (4, 48)), jnp.float32)
    zero = jnp.asarray(rng.integers(0, 16, (4, 48)), jnp.uint8)
    tile = MatmulTile(
        block_m=16, block_n=64, block_k=128, splits=1, transposed=True,
        launch=_triton.Launch(num_warps=4, num_stages=2),
    )  # fmt: skip
    arrays = (x, jnp.asarray(packed_int4.pack(codes)), scale, zero)
    plain, fused = (
        jax.jit(partial(int4_tiles, group_size=64, tile=replace(tile, fused=f)))(*arrays)
        for f in (False, True)
    )
    assert relative_error(fused, np.asarray(plain, np.float64)) <= 1e-6
