"""Products of many tokens on Hopper, in the simulation of a GPU's threads and barriers.

That the kernel compiles, and with which registers, stands in `test_compiled.py`; `tests/gpu` runs
it on a GPU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax import kernels
from swiftjax.kernels import _mosaic, dense_matmul
from swiftjax.kernels.dense_work import (
    CLUSTER,
    PIECE_BYTES,
    ROUND_US,
    ROWS,
    SHARED_BYTES,
    STORED,
    DenseTile,
    choose_dense_tile,
)
from swiftjax.kernels.matmul import runs_dense
from swiftjax.kernels.quantized_reference import FP8

FOLLOWING = ("nothing", "residual", "gated")
SMALL = DenseTile(warpgroups=2, columns=128)


class Product(NamedTuple):
    """Operands of a product and what it is in float64, all that follows included."""

    x: jax.Array
    kernel: jax.Array
    options: dict[str, jax.Array | bool | tuple[jax.Array, jax.Array] | None]
    wanted: np.ndarray

    def error(self, got: jax.Array) -> float:
        """The largest error of a row by its norm."""
        norms = np.linalg.norm(self.wanted, axis=1)
        error = np.linalg.norm(np.asarray(got, np.float64) - self.wanted, axis=1)
        return float((error / norms).max())


def make_product(
    tokens: int,
    inputs: int,
    outputs: int,
    following: str,
    dtype: jnp.dtype,
    *,
    outputs_first: bool = False,
) -> Product:
    """Random operands; those of 8 bits with scales of very different size."""
    rng = np.random.default_rng(tokens + inputs)
    x = jnp.asarray(rng.standard_normal((tokens, inputs)), dtype)
    kernel = jnp.asarray(rng.standard_normal((inputs, outputs)) * inputs**-0.5, dtype)
    wanted = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    scales = None
    if dtype == FP8:
        row_scale, scale = (np.exp2(rng.uniform(-2, 2, size)) for size in (tokens, outputs))
        scales = jnp.asarray(row_scale, jnp.float32), jnp.asarray(scale, jnp.float32)
        wanted = wanted * np.asarray(scales[0], np.float64)[:, None] * np.asarray(scales[1])
    residual = None
    if following == "residual":
        known = jnp.bfloat16 if dtype == FP8 else dtype
        residual = jnp.asarray(rng.standard_normal((tokens, outputs)), known)
        wanted = wanted + np.asarray(residual, np.float64)
    if following == "gated":
        gate, up = np.split(wanted, 2, axis=1)
        wanted = gate / (1 + np.exp(-gate)) * up
    options = {"residual": residual, "scales": scales, "gated": following == "gated"}
    turned = outputs_first or dtype == FP8
    return Product(x, kernel.T if turned else kernel, options | {"outputs_first": turned}, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("following", FOLLOWING)
def test_products_equal_float64(following: str, dtype: str) -> None:
    """Two tiles of tokens, two of columns, more pieces of a sum than there are stages."""
    inputs = (SMALL.stages + 1) * PIECE_BYTES // jnp.dtype(dtype).itemsize
    product = make_product(256, inputs, 256, following, jnp.dtype(dtype))
    got = dense_matmul.dense_matmul(product.x, product.kernel, **product.options, tile=SMALL)
    assert got.shape == product.wanted.shape
    assert got.dtype == ("bfloat16" if dtype == "float8_e4m3fn" else dtype)
    assert product.error(got) < 4e-3


@pytest.mark.parametrize("following", FOLLOWING)
def test_weights_by_outputs(following: str) -> None:
    product = make_product(128, 128, 256, following, jnp.dtype("bfloat16"), outputs_first=True)
    tile = DenseTile(warpgroups=1, columns=128)
    got = dense_matmul.dense_matmul(product.x, product.kernel, **product.options, tile=tile)
    assert product.error(got) < 4e-3


def test_large_gates_are_neither_nan_nor_infinite() -> None:
    """A sigmoid of a gate far below zero is zero, although its exponential overflows."""
    x = jnp.eye(128, dtype=jnp.bfloat16) * 300
    kernel = jnp.concatenate([-jnp.ones((128, 64)), jnp.ones((128, 64))], axis=1)
    tile = DenseTile(warpgroups=1, columns=128)
    got = dense_matmul.dense_matmul(x, kernel.astype(jnp.bfloat16), gated=True, tile=tile)
    np.testing.assert_array_equal(np.asarray(got, np.float32), 0)


def test_tiles_fit_the_shared_memory() -> None:
    for warpgroups, columns in ROUND_US:
        tile = DenseTile(warpgroups=warpgroups, columns=columns)
        stored = warpgroups * 2 * ROWS * STORED * 2
        assert stored + tile.stages * (tile.rows + columns) * PIECE_BYTES <= SHARED_BYTES
        assert tile.stages >= 4


def test_the_tile_that_was_fastest_is_chosen() -> None:
    """Of an 8B model's products, by tokens, bytes of a row and outputs (benchmarks/NOTES.md)."""
    fastest = {
        (256, 8192, 4096): (1, 128), (256, 8192, 6144): (2, 128), (512, 8192, 4096): (2, 128),
        (512, 14336, 4096): (2, 128), (1024, 8192, 4096): (2, 256), (1024, 8192, 6144): (2, 128),
        (1024, 14336, 4096): (2, 256), (2048, 8192, 6144): (2, 256), (8192, 8192, 28672): (2, 256),
    }  # fmt: skip
    for numbers, (warpgroups, columns) in fastest.items():
        assert choose_dense_tile(*numbers) == DenseTile(warpgroups=warpgroups, columns=columns)


def test_products_that_no_tile_fills_are_left_to_xla() -> None:
    bf16, f32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert dense_matmul.is_dense_faster(256, 4096, 4096, bf16)
    for tokens, inputs, outputs, dtype in (
        (200, 4096, 4096, bf16), (128, 4096, 4096, bf16), (256, 4096, 4160, bf16),
        (256, 4100, 4128, bf16), (256, 4096, 4096, f32), (8192, 4096, 4096, bf16),
        (512, 14336, 4096, bf16),
    ):  # fmt: skip
        assert not dense_matmul.is_dense_faster(tokens, inputs, outputs, dtype)


def test_gates_are_ours_where_rounds_are_full() -> None:
    """Or nearly so where one tile has all tokens."""
    bf16, sizes = jnp.dtype("bfloat16"), (32, 64, 128, 192, 256, 512, 768, 1024, 2048, 8192)
    ours = [n for n in sizes if dense_matmul.is_dense_faster(n, 4096, 28672, bf16, gated=True)]
    assert ours == [64, 128, 256, 1024, 2048, 8192]
    assert not dense_matmul.is_dense_faster(64, 2048, 16384, bf16, gated=True)  # a 1B model's


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_a_tile_of_all_tokens_shares_its_weights_with_none(warpgroups: int) -> None:
    tile = DenseTile(warpgroups=warpgroups, columns=128)
    assert tile.cluster(tile.rows) == 1 and tile.cluster(2 * tile.rows) == CLUSTER
    product = make_product(tile.rows, 128, 256, "gated", jnp.dtype("bfloat16"))
    got = dense_matmul.dense_matmul(product.x, product.kernel, gated=True, tile=tile)
    assert product.error(got) < 4e-3


@pytest.mark.parametrize("following", FOLLOWING)
def test_the_op_is_one_or_the_other(following: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's product, and the kernel, which is chosen for these numbers."""
    monkeypatch.setattr(dense_matmul, "LEAST_FULL", 0.0)
    product = make_product(128 * CLUSTER, 128, 256, following, jnp.dtype("bfloat16"))
    for implementation in ("xla", "mosaic"):
        if following == "gated":
            rows = kernels.gated_matmul(product.x, product.kernel, implementation=implementation)
            assert isinstance(rows, kernels.Gated) == (implementation == "xla")
            got = kernels.plain_rows(rows)
        else:
            got = kernels.matmul(
                product.x, product.kernel, product.options["residual"],
                implementation=implementation,
            )  # fmt: skip
        assert product.error(got) < 1e-2
        is_ours = runs_dense(product.x, 256, implementation, gated=following == "gated")
        assert is_ours == (implementation == "mosaic")


def test_simulated_programs_form_no_clusters() -> None:
    assert _mosaic.known_cluster(CLUSTER) == 1


@pytest.mark.parametrize("outputs_first", [False, True])
def test_invariant_rows_are_the_same_among_others(outputs_first: bool) -> None:
    """A product of one row, and of that row in the middle of many."""
    product = make_product(
        300, 128, 256, "residual", jnp.dtype("bfloat16"), outputs_first=outputs_first
    )
    residual = product.options["residual"]
    assert isinstance(residual, jax.Array)

    def run(rows: slice) -> np.ndarray:
        return np.asarray(
            kernels.matmul(
                product.x[rows],
                product.kernel,
                residual[rows],
                outputs_first=outputs_first,
                implementation="invariant",
            )
        )

    whole = run(slice(None))
    assert product.error(jnp.asarray(whole)) < 4e-3
    np.testing.assert_array_equal(whole[170:171], run(slice(170, 171)))


def test_invariant_gates_and_norms() -> None:
    product = make_product(40, 128, 512, "gated", jnp.dtype("bfloat16"))
    got = kernels.gated_matmul(product.x, product.kernel, implementation="invariant")
    assert isinstance(got, jax.Array) and product.error(got) < 4e-3
    normed = kernels.Normed(x=product.x, scale=jnp.full(128, 2.0, jnp.bfloat16), eps=1e-5)
    found = kernels.plain_rows(normed, "invariant")
    np.testing.assert_allclose(
        np.asarray(found, np.float32),
        np.asarray(kernels.plain_rows(normed), np.float32),
        rtol=1e-2,
    )
    assert found.dtype == jnp.bfloat16


def test_products_that_can_be_invariant() -> None:
    bf16 = jnp.dtype("bfloat16")
    assert kernels.knows_invariant(4096, 128256, bf16)
    assert kernels.knows_invariant(4096, 151936, bf16)
    assert not kernels.knows_invariant(4096, 151936, bf16, gated=True)  # by 256
    assert not kernels.knows_invariant(576, 49150, bf16)
    assert not kernels.knows_invariant(4096, 4096, jnp.dtype("float32"))
