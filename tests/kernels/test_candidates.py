"""A form of the int4 kernel that waits for a measurement is right before it, interpreted."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

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
