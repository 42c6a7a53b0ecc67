"""Forms of the kernels that wait for a measurement are right before it: interpreted, on a CPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode_layers import EPS, FORMS, Widths, add_norm, run_layers, shapes
from swiftjax.kernels import _triton, packed_int4
from swiftjax.kernels.decode_attention import choose_decode_config, split_decode
from swiftjax.kernels.int4_matmul import int4_tiles
from swiftjax.kernels.ragged_attention import RaggedConfig, block_attention
from swiftjax.kernels.rope_write import rotate_rows
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


def test_parts_are_added_by_the_norm_and_by_the_rotation() -> None:
    rng = np.random.default_rng(3)
    parts, x, scale, pages, angle = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((4, 5, 128), (5, 128), (128,), (9, 2, 16, 16), (5, 8))
    )
    total, normed = jax.jit(add_norm)(parts, x, scale)
    wanted = np.asarray(x + parts.sum(axis=0), np.float64)
    assert relative_error(total, wanted) <= 1e-6
    norm = np.sqrt((wanted**2).mean(axis=1, keepdims=True) + EPS)
    assert relative_error(normed, wanted / norm * np.asarray(scale, np.float64)) <= 1e-6
    slots = jnp.asarray([3, 17, 144, 90, 0], jnp.int32)
    rest = (jnp.cos(angle), jnp.sin(angle), slots)
    got = jax.jit(partial(rotate_rows, dtype=jnp.float32))(pages, pages, parts, *rest)
    plain = jax.jit(rotate_rows)(pages, pages, parts.sum(axis=0), *rest)
    for a, b in zip(got, plain, strict=True):
        assert relative_error(a, np.asarray(b, np.float64)) <= 1e-6


def test_layers_of_every_form_give_the_same_shapes() -> None:
    widths = Widths(model=64, mlp=128, heads=4, kv_heads=2, head=16)
    specs = shapes(widths, 2, 3, jnp.bfloat16)
    plain, *others = (jax.eval_shape(partial(run_layers, form), *specs) for form in FORMS.values())
    assert others and all(other == plain for other in others)
