"""Rounding of weights: what extreme values become."""

import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.converters.round_to_nearest import round_to_nearest
from swiftjax.kernels import packed_int4
from swiftjax.kernels.quantized_reference import FP8, quantize_rows
from swiftjax.quantization import QUANT_TYPES, QuantType, WeightFormat


def dequantized(weights: np.ndarray, kind: QuantType) -> np.ndarray:
    form = WeightFormat(kind=kind, group_size=32 if kind == "int4" else 0)
    packed = round_to_nearest(weights, form)
    if kind != "int4":
        return packed["kernel"].astype(np.float64) * packed["kernel_scale"][:, None]
    arrays = (jnp.asarray(values) for values in packed.values())
    dense = packed_int4.dequantize(*arrays, num_inputs=weights.shape[1], group_size=32)
    return np.asarray(dense, np.float64)


def test_b035_fp8_values_are_clamped_before_they_are_cast() -> None:
    """Scale 1 (the largest is 448): bytes of 448 and what is rounded to it, never NaN."""
    weights = np.array([[448, 447, 440, -448, 1, 0]], np.float32)
    packed = round_to_nearest(weights, WeightFormat(kind="fp8"))
    assert packed["kernel"].view(np.uint8).tolist() == [[0x7E, 0x7E, 0x7E, 0xFE, 0x38, 0x00]]
    values, scale = quantize_rows(jnp.asarray([[448.0, 464, 465, 480, 1000, -1000]]), 448.0)
    assert np.isfinite(np.asarray((values * scale).astype(FP8).astype(jnp.float32))[0, 0])
    clamped = np.asarray(jnp.clip(values * scale, -448, 448).astype(FP8))
    assert clamped.view(np.uint8).tolist() == [[0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE]]


@pytest.mark.parametrize("kind", QUANT_TYPES)
def test_b035_rows_of_any_size(kind: QuantType) -> None:
    """Rows whose largest value is 0, 1e-38 and 1e30: finite, zeros exact, error within 1/8.

    Integers count in steps of the smallest normal number at least, which is more than 1e-38.
    """
    row = np.linspace(-1, 1, 40, dtype=np.float32)
    weights = np.stack([row * 0, row * np.float32(1e-38), row * np.float32(1e30), row])
    dense = dequantized(weights, kind)
    assert np.isfinite(dense).all() and not dense[0].any()
    peak = np.abs(weights).max(axis=1, keepdims=True).astype(np.float64)
    smallest = 0.0 if kind == "fp8" else 2.0**-126
    assert (np.abs(dense - weights) <= np.maximum(peak / 8, smallest)).all()


def test_b035_activations_of_any_size() -> None:
    rows = jnp.asarray(np.array([[0, 0], [1e-38, -5e-39], [1e30, -1e29], [3e38, 1]], np.float32))
    values, scale = quantize_rows(rows, 448.0)
    back = np.asarray(values.astype(FP8).astype(jnp.float32) * scale, np.float64)
    assert np.isfinite(back).all() and not back[0].any()
    peak = np.abs(np.asarray(rows, np.float64)).max(axis=1, keepdims=True)
    # XLA counts what is below the smallest normal number as zero.
    allowed = np.maximum(peak / 8, 2.0**-126)
    assert (np.abs(back - np.asarray(rows, np.float64)) <= allowed).all()


def test_int4_range_of_one_sign_contains_zero() -> None:
    weights = np.full((1, 32), 3.0, np.float32)
    assert np.allclose(dequantized(weights, "int4"), 3.0)
    assert np.allclose(dequantized(-weights, "int4"), -3.0)
