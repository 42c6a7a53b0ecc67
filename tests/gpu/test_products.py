"""Products with quantised weights on a real GPU, and the rounding of rows in front of them."""

import itertools
from functools import partial

import jax
import numpy as np
import pytest

from swiftjax import kernels
from swiftjax.kernels import _triton
from swiftjax.kernels.dense_matmul import dense_matmul
from swiftjax.kernels.dense_work import ROUND_US, DenseTile
from swiftjax.kernels.hopper_matmul import hopper_int4
from swiftjax.kernels.hopper_work import HopperTile
from tests.kernels.test_dense_matmul import FOLLOWING, make_product
from tests.kernels.test_hopper_matmul import (
    SHAPES,
    dense_int4,
    int4_weights,
    rows,
    worst_row,
)
from tests.kernels.test_quantized_matmul import MATMULS, check_product
from tests.kernels.test_rounded_rows import SOURCES, UNITS, check_rounded, make_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an NVIDIA GPU"),
]


@pytest.mark.skipif(not _triton.has_fp8(), reason="needs a GPU with fp8")
@pytest.mark.parametrize("width", [1, 577, 4096, 14336, 28672])
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("source", SOURCES)
def test_rows_are_rounded_to_the_nearest_codes(source: str, dtype: str, width: int) -> None:
    rows = make_rows(source, width, dtype, num_rows=300)
    found, again = check_rounded(rows), check_rounded(rows)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("num_tokens", [1, 16, 24, 37, 64, 300])
@pytest.mark.parametrize("kind", ["int4", *MATMULS])
def test_products_of_a_step(kind: str, num_tokens: int) -> None:
    check_product(kind, num_tokens)


@pytest.mark.skipif(_triton.capability() != _triton.HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("num_tokens", [16, 100, 600])
@pytest.mark.parametrize("shape", [(1024, 512), (4096, 256)])
def test_products_on_hopper_equal_dense(shape: tuple[int, int], num_tokens: int) -> None:
    """Chosen tiles, more of them than multiprocessors or parts of the sum."""
    x, weights = rows(num_tokens, shape[0]), int4_weights(*shape, 128)
    multiply = jax.jit(partial(hopper_int4, group_size=128))
    assert worst_row(multiply(x, *weights), x, dense_int4(weights, shape[0], 128)) < 5e-3
    np.testing.assert_array_equal(multiply(x, *weights), multiply(x, *weights))


@pytest.mark.skipif(_triton.capability() != _triton.HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("num_tokens", [37, 64, 100, 256, 700, 1024])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_a_model_on_hopper_equal_dense(shape: tuple[int, int], num_tokens: int) -> None:
    x, weights = rows(num_tokens, shape[0]), int4_weights(*shape, 128)
    multiply = jax.jit(partial(kernels.int4_matmul, group_size=128, implementation="mosaic"))
    assert worst_row(multiply(x, *weights), x, dense_int4(weights, shape[0], 128)) < 5e-3


@pytest.mark.skipif(_triton.capability() != _triton.HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("tokens", "rows_of"), [(16, 64), (32, 128), (128, 128), (256, 64)])
def test_tiles_on_hopper_equal_dense(tokens: int, rows_of: int, group_size: int) -> None:
    """More tiles than there are multiprocessors; whole sums and parts, scaled before and after."""
    x, weights = rows(tokens * 3 - 5, 512), int4_weights(512, 16384, group_size)
    wanted = dense_int4(weights, 512, group_size)
    for splits, late in itertools.product((1, 2), (False, True)):
        if late and (group_size < 64 or tokens * rows_of > 64 * 128):
            continue
        tile = HopperTile(tokens=tokens, rows=rows_of, splits=splits, scales_late=late)
        run = jax.jit(partial(hopper_int4, group_size=group_size, tile=tile))
        assert worst_row(run(x, *weights), x, wanted) < 5e-3, tile


DENSE_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
DENSE_TILES = [DenseTile(warpgroups=w, columns=columns) for w, columns in ROUND_US]


@pytest.mark.skipif(_triton.capability() != _triton.HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("dtype", DENSE_DTYPES)
def test_dense_products_equal_float64(dtype: str, following: str) -> None:
    """More tiles than multiprocessors, more pieces than stages; all tiles give the same bits."""
    product = make_product(512, 2048, 16384, following, np.dtype(dtype))
    found = []
    for tile in DENSE_TILES:
        run = jax.jit(partial(dense_matmul, gated=following == "gated", tile=tile,
                              outputs_first=bool(product.options["outputs_first"])))  # fmt: skip
        arrays = {name: product.options[name] for name in ("residual", "scales")}
        got = run(product.x, product.kernel, **arrays)
        assert product.error(got) < 5e-3, tile
        found.append(np.asarray(got))
        np.testing.assert_array_equal(found[0], run(product.x, product.kernel, **arrays))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.skipif(_triton.capability() != _triton.HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_gates_of_few_tokens_equal_float64(warpgroups: int) -> None:
    """One tile has all tokens; nobody shares its weights."""
    tile = DenseTile(warpgroups=warpgroups, columns=256)
    product = make_product(tile.rows, 2048, 40960, "gated", np.dtype("bfloat16"))
    run = jax.jit(partial(dense_matmul, gated=True, tile=tile))
    got = run(product.x, product.kernel)
    assert product.error(got) < 5e-3
    np.testing.assert_array_equal(got, run(product.x, product.kernel))


@pytest.mark.skipif(_triton.capability() != _triton.HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", DENSE_DTYPES)
def test_a_row_of_a_dense_product_is_the_same_among_others(dtype: str) -> None:
    product = make_product(1024, 4096, 4096, "nothing", np.dtype(dtype))
    whole, *parts = (
        jax.jit(partial(dense_matmul, outputs_first=bool(product.options["outputs_first"])))(
            product.x[rows],
            product.kernel,
            scales=None
            if product.options["scales"] is None
            else (product.options["scales"][0][rows], product.options["scales"][1]),
        )
        for rows in (slice(None), slice(0, 256), slice(256, 384), slice(512, 1024))
    )
    together = np.concatenate([whole[:256], whole[256:384], whole[512:]])
    np.testing.assert_array_equal(together, np.concatenate(parts))
