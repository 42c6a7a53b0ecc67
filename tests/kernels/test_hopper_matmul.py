"""Products with 4-bit weights on Hopper, in the simulation of a GPU's threads and barriers.

The simulation is slow, so it gets one case of each kind that has everything in it. That the kernel
compiles, and with which registers, stands in `test_compiled.py`; `tests/gpu` runs it on a GPU.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax import kernels
from swiftjax.kernels import hopper_matmul, packed_int4
from swiftjax.kernels.hopper_matmul import hopper_int4, knows_int4_step
from swiftjax.kernels.hopper_weights import (
    STEP,
    float_exponents,
    half_exponents,
    shifted_zero,
    unpack,
    unpack_unscaled,
)
from swiftjax.kernels.hopper_work import SHARED_BYTES, HopperTile, choose_tile

SHAPES = ((4096, 28672), (14336, 4096), (4096, 6144), (4096, 4096))


def int4_weights(
    inputs: int, outputs: int, group_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, scales of very different size, and any zero points."""
    rng = np.random.default_rng(inputs)
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    groups = (-(-inputs // group_size), outputs)
    scale = np.exp2(rng.integers(-3, 4, groups)) * rng.uniform(0.5, 1, groups)
    zero = rng.integers(0, 16, groups).astype(np.uint8)
    return jnp.asarray(packed_int4.pack(codes)), jnp.asarray(scale, jnp.float32), jnp.asarray(zero)


def rows(num_tokens: int, num_inputs: int) -> jax.Array:
    values = np.random.default_rng(num_tokens).standard_normal((num_tokens, num_inputs))
    return jnp.asarray(values, jnp.bfloat16)


def worst_row(got: jax.Array, x: jax.Array, weights: np.ndarray) -> float:
    """The largest error of a row by its norm, against float64."""
    wanted = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    error = np.linalg.norm(np.asarray(got, np.float64) - wanted, axis=1)
    return float((error / np.linalg.norm(wanted, axis=1)).max())


def dense_int4(arrays: tuple[jax.Array, ...], num_inputs: int, group_size: int) -> np.ndarray:
    dense = packed_int4.dequantize(*arrays, num_inputs=num_inputs, group_size=group_size)  # type: ignore[arg-type]
    return np.asarray(dense.astype(jnp.bfloat16), np.float64)


def exact_int4(arrays: tuple[jax.Array, ...], num_inputs: int, group_size: int) -> np.ndarray:
    """Weights that are not rounded to a type of 16 bits."""
    dense = packed_int4.dequantize(*arrays, num_inputs=num_inputs, group_size=group_size)  # type: ignore[arg-type]
    return np.asarray(dense, np.float64)


def test_int4_tiles_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded tokens, two tiles, two groups a step, more steps than there are stages."""
    monkeypatch.setattr(HopperTile, "stages", lambda *_: (2, 1))
    x, arrays = rows(20, 256), int4_weights(256, 128, 64)
    tile = HopperTile(tokens=16, rows=64)
    y = jax.jit(lambda *a: hopper_int4(*a, group_size=64, tile=tile))(x, *arrays)
    assert y.dtype == x.dtype
    assert worst_row(y, x, dense_int4(arrays, 256, 64)) < 4e-3


def test_int4_sums_that_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of rows for a warpgroup, two pieces of activations to a group."""
    monkeypatch.setattr(HopperTile, "stages", lambda *_: (2, 1))
    x, arrays = rows(16, 256), int4_weights(256, 256, 128)
    tile = HopperTile(tokens=16, rows=128, scales_late=True)
    y = jax.jit(lambda *a: hopper_int4(*a, group_size=128, tile=tile))(x, *arrays)
    assert worst_row(y, x, exact_int4(arrays, 256, 128)) < 4e-3


def test_int4_with_parts_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of rows for a warpgroup, and one program that takes both parts."""
    monkeypatch.setattr(HopperTile, "stages", lambda *_: (2, 2))
    x, arrays = rows(16, 384), int4_weights(384, 256, 128)
    tile = HopperTile(tokens=16, rows=128, splits=2)
    y = jax.jit(lambda *a: hopper_int4(*a, group_size=128, tile=tile))(x, *arrays)
    assert worst_row(y, x, dense_int4(arrays, 384, 128)) < 4e-3


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_unpacked_int4_is_what_dequantizing_gives(group_size: int) -> None:
    words, scale, zero = int4_weights(128, 64, group_size)
    exponents = [jnp.int32(i) for i in float_exponents()]
    groups = [*scale], [*zero.astype(jnp.float32)]
    dtype = jnp.dtype(jnp.bfloat16)
    parts = [unpack(words, *groups, part, exponents, dtype) for part in range(2)]
    got = np.asarray(jnp.concatenate(parts, axis=1), np.float64)
    np.testing.assert_array_equal(got, dense_int4((words, scale, zero), 128, group_size))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_unpacked_int4_without_scales_is_whole_numbers(dtype: str) -> None:
    words, _, zero = int4_weights(128, 64, 128)
    known = jnp.dtype(dtype)
    rest = shifted_zero(zero[0], known), 1, jnp.int32(half_exponents(known)), known
    wanted = packed_int4.unpack(words, 128)[:, 64:] - zero[0].astype(jnp.int32)[:, None]
    np.testing.assert_array_equal(np.asarray(unpack_unscaled(words, *rest), np.int32), wanted)


def test_chosen_tiles_fit_and_leave_copies_time() -> None:
    for shape, tokens in itertools.product(SHAPES, (16, 64, 200, 2048)):
        tile = choose_tile(tokens, *shape, group_size=64)
        assert tile is not None
        pieces, steps = tile.stages(2)
        weights = tile.outputs * (64 + 5 * 2)
        stored = 4 * tile.stored * tile.rows * tile.itemsize
        assert pieces * tile.tokens * 128 + steps * weights + stored <= SHARED_BYTES
        assert pieces >= 4 and steps >= 3
        parts = -(-(shape[0] // STEP) // tile.splits)
        assert parts * (tile.splits - 1) < shape[0] // STEP, "a part without steps"


def test_a_step_is_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_matmul, "STEP_TOKENS", (16,))
    x, arrays = rows(11, 128), int4_weights(128, 128, 128)
    assert knows_int4_step(x, 128, 128)
    run = partial(kernels.int4_matmul, group_size=128, implementation="mosaic")
    y = jax.jit(run)(x, *arrays)
    assert y.shape == (11, 128) and y.dtype == x.dtype
    assert worst_row(y, x, exact_int4(arrays, 128, 128)) < 4e-3


def test_other_steps_are_left_to_others() -> None:
    known = [tokens for tokens in (8, 32, 33, 64, 65, 1024, 1025) if knows(tokens)]
    assert known == [33, 64, 65, 1024]
    assert knows(64, outputs=128) and not knows(64, outputs=192)
    assert not knows(64, inputs=576) and not knows(64, dtype=jnp.dtype(jnp.float32))


def knows(
    tokens: int, *, inputs: int = 256, outputs: int = 256, dtype: jnp.dtype | None = None
) -> bool:
    x = rows(tokens, inputs)
    return knows_int4_step(x if dtype is None else x.astype(dtype), outputs, 128)
