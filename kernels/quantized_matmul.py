"""Products with quantised weights: the ops that the model's projections call.

Each picks its implementation; what the products mean, and the layouts, stands in
`quantized_reference.py`. The Triton kernels serve few tokens, where reading the weights takes the
time; many tokens are left to XLA, which writes the weights out in the type of `x` once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int32, UInt8

from swiftjax.kernels import _triton
from swiftjax.kernels import quantized_reference as reference
from swiftjax.kernels.implementation import Implementation, choose_implementation, runs_triton
from swiftjax.kernels.int4_matmul import int4_tiles
from swiftjax.kernels.narrow_matmul import narrow_matmul

# Up to so many tokens the kernels are used.
MOST_TOKENS = 64


def int8_matmul(
    x: Float[Array, "T K"],
    kernel: Int8[Array, "N K"],
    scale: Float32[Array, " N"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """x @ (kernel * scale).T with weights of 8 bits and activations as they are."""
    if _is_for_triton(x, implementation):
        return narrow_matmul(x, kernel, scale, None, dtype=x.dtype)
    return reference.int8_matmul(x, kernel, scale)


def int4_matmul(
    x: Float[Array, "T K"],
    kernel: Int32[Array, "N words"],
    scale: Float32[Array, "G N"],
    zero: UInt8[Array, "G N"],
    *,
    group_size: int,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """x @ weights.T for weights packed as `packed_int4` says."""
    if _is_for_triton(x, implementation):
        return int4_tiles(x, kernel, scale, zero, group_size=group_size)
    return reference.int4_matmul(x, kernel, scale, zero, group_size=group_size)


def w8a8_matmul(
    x: Float[Array, "T K"],
    kernel: Int8[Array, "N K"],
    scale: Float32[Array, " N"],
    input_scale: Float32[Array, " 1"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """int8 weights times int8 activations; every token gets its scale here, or all are given one.

    What a given scale cannot hold is cut off.
    """
    if _is_for_triton(x, implementation):
        values, row_scale = reference.quantize_rows(x, reference.INT8_MAX, input_scale)
        rows = jnp.round(values).astype(jnp.int8)
        return narrow_matmul(rows, kernel, scale, row_scale[:, 0], dtype=x.dtype)
    return reference.w8a8_matmul(x, kernel, scale, input_scale)


def fp8_matmul(
    x: Float[Array, "T K"],
    kernel: Float[Array, "N K"],
    scale: Float32[Array, " N"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """e4m3 weights times e4m3 activations; every token gets its scale here.

    GPUs of a compute capability under 8.9 have no such products and are left to XLA.
    """
    if _is_for_triton(x, implementation) and _triton.has_fp8():
        values, row_scale = reference.quantize_rows(x, reference.FP8_MAX)
        rows = values.astype(reference.FP8)
        return narrow_matmul(rows, kernel, scale, row_scale[:, 0], dtype=x.dtype)
    return reference.fp8_matmul(x, kernel, scale)


def _is_for_triton(x: Float[Array, "T K"], implementation: Implementation | None) -> bool:
    """Few tokens; float32 has no fast tensor cores and is left to XLA."""
    chosen = implementation or choose_implementation(jax.default_backend())
    return runs_triton(chosen) and x.shape[0] <= MOST_TOKENS and x.dtype != jnp.float32
