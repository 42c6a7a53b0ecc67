"""What the products with quantised weights mean, in plain jnp; also the portable implementation.

Kernels are stored [outputs, inputs]: tensor cores read 8-bit operands along the summed dimension.
Letters: T tokens, K inputs, N outputs, G groups of inputs. Sums are float32 (int32 for w8a8) and
results have the dtype of `x`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Int32, Num, UInt8

from swiftjax.kernels import packed_int4

FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0  # the cast makes NaN of what is larger
INT8_MAX = 127.0
# The smallest normal float32: a scale below it would be flushed to zero.
SMALLEST_SCALE = 2.0**-126


class RoundedRows(NamedTuple):
    """Rows in 8 bits: row t is codes[t] * scale[t]."""

    codes: Num[Array, "T K"]  # int8 or e4m3
    scale: Float32[Array, " T"]


def int8_matmul(
    x: Float[Array, "T K"], kernel: Int8[Array, "N K"], scale: Float32[Array, " N"]
) -> Float[Array, "T N"]:
    """x @ (kernel * scale).T with weights of 8 bits, activations as they are."""
    return (_dot(x, kernel.astype(x.dtype)) * scale[None, :]).astype(x.dtype)


def int4_matmul(
    x: Float[Array, "T K"],
    kernel: Int32[Array, "N words"],
    scale: Float32[Array, "G N"],
    zero: UInt8[Array, "G N"],
    *,
    group_size: int,
) -> Float[Array, "T N"]:
    """x @ weights.T with the weights that `packed_int4.dequantize` gives."""
    weights = packed_int4.dequantize(
        kernel, scale, zero, num_inputs=x.shape[1], group_size=group_size
    )
    return _dot(x, weights.astype(x.dtype)).astype(x.dtype)


def w8a8_matmul(
    x: Float[Array, "T K"],
    kernel: Int8[Array, "N K"],
    scale: Float32[Array, " N"],
    input_scale: Float32[Array, " 1"] | None = None,
) -> Float[Array, "T N"]:
    """The product of int8 weights with int8 activations, whose scale is per token or given."""
    return multiply_rounded(round_rows(x, jnp.int8, input_scale), kernel, scale, x.dtype)


def fp8_matmul(
    x: Float[Array, "T K"], kernel: Float[Array, "N K"], scale: Float32[Array, " N"]
) -> Float[Array, "T N"]:
    """The product of e4m3 weights with e4m3 activations, which get a scale per token here."""
    return multiply_rounded(round_rows(x, FP8), kernel, scale, x.dtype)


def multiply_rounded(
    rows: RoundedRows, kernel: Num[Array, "N K"], scale: Float32[Array, " N"], dtype: jnp.dtype
) -> Float[Array, "T N"]:
    """The product of rows and weights that are both in 8 bits, in `dtype`."""
    wide = jnp.float32 if kernel.dtype == FP8 else jnp.int32
    y = lax.dot_general(rows.codes, kernel, CONTRACT_LAST, preferred_element_type=wide)
    return apply_scales(y, rows.scale, scale, dtype)


def apply_scales(
    y: Num[Array, "T N"],
    row_scale: Float32[Array, " T"],
    scale: Float32[Array, " N"],
    dtype: DTypeLike,
) -> Float[Array, "T N"]:
    """Multiply rows and columns in float32; `dtype` is that of the result."""
    return (y.astype(jnp.float32) * row_scale[:, None] * scale[None, :]).astype(dtype)


CONTRACT_LAST = (((1,), (1,)), ((), ()))


def largest_value(dtype: DTypeLike) -> float:
    """The largest number that is stored in this type of 8 bits, before the scale."""
    return FP8_MAX if dtype == FP8 else INT8_MAX


def round_rows(
    x: Float[Array, "T K"], dtype: DTypeLike, given: Float32[Array, " 1"] | None = None
) -> RoundedRows:
    """Round every row to int8 or e4m3 as `quantize_rows` scales it."""
    values, scale = quantize_rows(x, largest_value(dtype), given)
    codes = values if dtype == FP8 else jnp.round(values)
    return RoundedRows(codes.astype(dtype), scale[:, 0])


def quantize_rows(
    x: Float[Array, "T K"], largest: float, given: Float32[Array, " 1"] | None = None
) -> tuple[Float32[Array, "T K"], Float32[Array, "T 1"]]:
    """Scale every row to fit [-largest, largest]; returns values not yet rounded, and scales.

    With a `given` scale all rows have that, and values outside the range are cut off.
    """
    x = x.astype(jnp.float32)
    if given is None:
        peak = jnp.max(jnp.abs(x), axis=1, keepdims=True)
        scale = jnp.maximum(peak / largest, SMALLEST_SCALE)
    else:
        scale = jnp.broadcast_to(given[None, :], (x.shape[0], 1))
    return jnp.clip(x / scale, -largest, largest), scale


def _dot(x: Float[Array, "T K"], weights: Float[Array, "N K"]) -> Float32[Array, "T N"]:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, weights, CONTRACT_LAST, precision=precision, preferred_element_type=jnp.float32
    )
