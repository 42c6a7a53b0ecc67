"""Forms of products that wait for a measurement are right before it, on a CPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import quantized_problems as products
from swiftjax.kernels import _triton, packed_int4
from swiftjax.kernels.int4_matmul import int4_tiles
from swiftjax.kernels.split_k import MatmulTile
from tests.kernels.attention_case import relative_error


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


def test_weights_written_out_apart_give_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROTATED_BYTES", 1)
    monkeypatch.setattr(products, "TOLERANCE", 4e-3)
    for kind in products.HOPPER_KINDS:
        problem = products.make_problem(kind, 256, 256)
        x = products.rows_of(problem, 5)
        products.check(problem, x, jax.jit(products.apart(kind))(x, *problem.weights[0]))
