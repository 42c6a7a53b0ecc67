"""Products with quantised weights against float64, in every implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swiftjax.converters.round_to_nearest import round_to_nearest
from swiftjax.kernels import (
    Gated,
    _triton,
    fp8_gated,
    fp8_matmul,
    int4_matmul,
    int8_matmul,
    packed_int4,
    plain_rows,
    w8a8_matmul,
)
from swiftjax.kernels.int4_matmul import choose_int4_tile, int4_tiles
from swiftjax.kernels.narrow_matmul import narrow_matmul
from swiftjax.kernels.quantized_reference import FP8, quantize_rows
from swiftjax.kernels.split_k import MatmulTile
from swiftjax.quantization import WeightFormat

MATMULS = {"int8": int8_matmul, "w8a8": w8a8_matmul, "fp8": fp8_matmul}


def problem(num_tokens: int, num_inputs: int, num_outputs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(num_tokens + num_inputs)
    x = rng.standard_normal((num_tokens, num_inputs)).astype(np.float32)
    weights = rng.standard_normal((num_outputs, num_inputs)).astype(np.float32)
    # Columns and rows of very different size: a scale taken along the wrong axis shows.
    weights *= np.exp2(rng.integers(-4, 5, (num_outputs, 1))).astype(np.float32)
    x *= np.exp2(rng.integers(-4, 5, (num_tokens, 1))).astype(np.float32)
    return x, weights


def relative_error(got: jax.Array, wanted: np.ndarray) -> float:
    """The worst error of a row, by the norm of that row."""
    error = np.linalg.norm(np.asarray(got, np.float64) - wanted, axis=1)
    return float((error / np.linalg.norm(wanted, axis=1)).max())


def test_nibbles_of_equal_number_are_neighbouring_inputs() -> None:
    codes = np.zeros((1, 200), np.uint8)
    codes[0, 128 + 16 * 3 + 5] = 9  # block 1, plane 3, word 5
    packed = packed_int4.pack(codes)
    assert packed.shape == (1, 32) and packed[0, 16 + 5] == 9 << 12
    assert np.count_nonzero(packed) == 1


@pytest.mark.parametrize("num_inputs", [1, 64, 128, 129, 576])
def test_packing_and_unpacking_give_the_codes_back(num_inputs: int) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (6, num_inputs)).astype(np.uint8)
    unpacked = packed_int4.unpack(jnp.asarray(packed_int4.pack(codes)), num_inputs)
    assert np.array_equal(np.asarray(unpacked), codes)


@pytest.mark.parametrize("kind", MATMULS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_bits(kind: str, dtype: str) -> None:
    """The product of the rounded factors, to the precision of the sum."""
    x, weights = problem(5, 96, 40)
    packed = round_to_nearest(weights, WeightFormat(kind=kind))  # type: ignore[arg-type]
    dense = packed["kernel"].astype(np.float64) * packed["kernel_scale"][:, None]
    rows = jnp.asarray(x, dtype)
    seen = np.asarray(rows, np.float64)
    if kind != "int8":
        limit = 127 if kind == "w8a8" else 448
        scale = np.abs(seen).max(axis=1, keepdims=True) / limit
        rounded = seen / scale
        kept = np.rint(rounded) if kind == "w8a8" else rounded.astype(ml_dtypes.float8_e4m3fn)
        seen = kept.astype(np.float64) * scale
    y = MATMULS[kind](rows, *map(jnp.asarray, packed.values()))
    assert y.dtype == rows.dtype
    assert relative_error(y, seen @ dense.T) < (2e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("num_inputs", [128, 576, 72])
def test_int4(group_size: int, num_inputs: int) -> None:
    """Whole groups, a short last group, and fewer inputs than a group."""
    x, weights = problem(3, num_inputs, 24)
    packed = round_to_nearest(weights, WeightFormat(kind="int4", group_size=group_size))
    arrays = {name: jnp.asarray(values) for name, values in packed.items()}
    dense = packed_int4.dequantize(*arrays.values(), num_inputs=num_inputs, group_size=group_size)
    wanted = np.asarray(x, np.float64) @ np.asarray(dense, np.float64).T
    for name in ("xla", "triton"):  # GPUs write the weights of float32 products out
        y = int4_matmul(
            jnp.asarray(x), *arrays.values(), group_size=group_size, implementation=name
        )
        assert relative_error(y, wanted) < 2e-6
    # Half a step of the group's range at most, and each group has a range of its own.
    for first in range(0, num_inputs, group_size):
        group = slice(first, first + group_size)
        part = weights[:, group]
        step = (np.maximum(part.max(1), 0) - np.minimum(part.min(1), 0)) / 15
        assert (np.abs(np.asarray(dense)[:, group] - part) <= step[:, None] * 0.5001).all()


def test_int4_weights_written_out_for_many_tokens() -> None:
    """On a GPU; with the roundings of the plain product."""
    x, weights = problem(70, 576, 24)
    packed = round_to_nearest(weights, WeightFormat(kind="int4", group_size=128))
    arrays = (jnp.asarray(x, jnp.bfloat16), *map(jnp.asarray, packed.values()))
    wanted, got = (
        np.asarray(int4_matmul(*arrays, group_size=128, implementation=name), np.float64)
        for name in ("xla", "triton")
    )
    assert relative_error(got, wanted) < 5e-3


def tile(block_m: int, block_n: int, block_k: int, splits: int, transposed: bool) -> MatmulTile:
    launch = _triton.Launch(num_warps=4, num_stages=2)
    return MatmulTile(
        block_m=block_m, block_n=block_n, block_k=block_k, splits=splits,
        transposed=transposed, launch=launch,
    )  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", MATMULS)
def test_triton_eight_bits(kind: str, splits: int, transposed: bool) -> None:
    """Neither tokens, outputs nor inputs fill their tiles."""
    x, weights = problem(21, 200, 40)
    form = WeightFormat(kind=kind)  # type: ignore[arg-type]
    arrays = [jnp.asarray(values) for values in round_to_nearest(weights, form).values()]
    rows, scale = jnp.asarray(x, jnp.bfloat16), None
    wanted = np.asarray(MATMULS[kind](rows, *arrays, implementation="xla"), np.float64)
    if kind != "int8":
        limit, stored = (127.0, jnp.int8) if kind == "w8a8" else (448.0, FP8)
        values, row_scale = quantize_rows(rows, limit)
        values = jnp.round(values) if kind == "w8a8" else values
        rows, scale = values.astype(stored), row_scale[:, 0]
    y = narrow_matmul(
        rows, *arrays, scale, dtype=jnp.dtype(jnp.bfloat16),
        tile=tile(16, 32, 64, splits, transposed),
    )  # fmt: skip
    assert y.dtype == jnp.bfloat16 and relative_error(y, wanted) < 6e-3


@pytest.mark.parametrize(
    ("group_size", "splits", "transposed"),
    [(32, 1, True), (64, 3, False), (64, 1, True), (128, 3, True), (128, 1, False)],
)
def test_triton_int4(group_size: int, splits: int, transposed: bool) -> None:
    """The last block of 128 inputs is short, and so is the last group."""
    x, weights = problem(21, 600, 40)
    packed = round_to_nearest(weights, WeightFormat(kind="int4", group_size=group_size))
    arrays = [jnp.asarray(values) for values in packed.values()]
    wanted = int4_matmul(jnp.asarray(x), *arrays, group_size=group_size, implementation="xla")
    y = int4_tiles(
        jnp.asarray(x), *arrays, group_size=group_size, tile=tile(16, 32, 128, splits, transposed)
    )
    assert relative_error(y, np.asarray(wanted, np.float64)) < 2e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fp8_gates_of_many_tokens(dtype: str) -> None:
    """Their scales come last; a product in bfloat16 has one rounding more, a gate two such."""
    x, weights = problem(70, 576, 48)
    packed = round_to_nearest(weights, WeightFormat(kind="fp8"))
    arrays = (jnp.asarray(x / 1024, dtype), *map(jnp.asarray, packed.values()))
    gated = fp8_gated(*arrays, implementation="triton")
    assert (gated.scales is None) == (dtype == "float16")
    gates = (gated, *(Gated(fp8_matmul(*arrays, implementation=i)) for i in ("triton", "xla")))
    found, same, wanted = (np.asarray(plain_rows(rows), np.float64) for rows in gates)
    assert np.array_equal(found, same) and relative_error(found, wanted) < 2e-2
    assert gated.dtype == dtype


def check_product(kind: str, num_tokens: int) -> None:
    """What the model calls, with the tile that the kernel chooses itself; int4 in four parts."""
    x, weights = problem(num_tokens, 2112 if kind == "int4" else 576, 96)
    group = 64 if kind == "int4" else 0
    form = WeightFormat(kind=kind, group_size=group)  # type: ignore[arg-type]
    arrays = [jnp.asarray(values) for values in round_to_nearest(weights, form).values()]
    matmul = partial(int4_matmul, group_size=64) if kind == "int4" else MATMULS[kind]
    rows = jnp.asarray(x, jnp.bfloat16)
    wanted = np.asarray(matmul(rows, *arrays, implementation="xla"), np.float64)
    assert relative_error(matmul(rows, *arrays, implementation="triton"), wanted) < 8e-3


@pytest.mark.parametrize(
    ("num_tokens", "splits", "sizes"),
    [(1, (2, 16, 8, 8), (64, 2, False)), (16, (2, 16, 8, 8), (64, 2, False)),
     (17, (2, 16, 8, 8), (128, 4, False)), (33, (1, 8, 4, 8), (128, 4, True))],
)  # fmt: skip
def test_int4_tiles_of_8b_shapes(
    num_tokens: int, splits: tuple[int, ...], sizes: tuple[int, int, bool]
) -> None:
    shapes = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
    tiles = [choose_int4_tile(num_tokens, *shape) for shape in shapes]
    assert tuple(tile.splits for tile in tiles) == splits
    assert {(t.block_n, t.launch.num_warps, t.transposed) for t in tiles} == {sizes}


@pytest.mark.parametrize("num_tokens", [1, 20, 64])
@pytest.mark.parametrize("kind", ["int4", *MATMULS])
def test_chosen_tiles_compute_the_product(kind: str, num_tokens: int) -> None:
    check_product(kind, num_tokens)
