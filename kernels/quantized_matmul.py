"""Products with quantised weights: the ops that the model's projections call.

Each picks its implementation; what the products mean, and the layouts, stands in
`quantized_reference.py`. The Triton kernels serve few tokens, where reading the weights takes the
time; many tokens are left to XLA's products of weights that are written out in the type of `x`.
Between the two `hopper_matmul.py` serves weights of 4 bits.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int8, Int32, Num, UInt8

from swiftjax.kernels import _triton
from swiftjax.kernels import quantized_reference as reference
from swiftjax.kernels.dense_matmul import dense_matmul
from swiftjax.kernels.hopper_matmul import int4_step, knows_int4_step
from swiftjax.kernels.implementation import Implementation, choose_implementation, runs_triton
from swiftjax.kernels.int4_matmul import int4_tiles
from swiftjax.kernels.matmul import runs_dense
from swiftjax.kernels.narrow_matmul import narrow_matmul
from swiftjax.kernels.rounded_rows import MOST_SCALED, Gated, Rows, plain_rows, round_rows
from swiftjax.kernels.written_out import multiply_written_out

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
    if _is_for_triton(x.shape[0], x.dtype, implementation):
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
    chosen = implementation or choose_implementation(jax.default_backend())
    if chosen == "mosaic" and knows_int4_step(x, kernel.shape[0], group_size):
        run = int4_step
    elif _is_for_triton(x.shape[0], x.dtype, implementation):
        run = int4_tiles
    elif runs_triton(chosen) or (chosen == "xla" and jax.default_backend() == "gpu"):
        run = multiply_written_out
    else:
        run = reference.int4_matmul
    return run(x, kernel, scale, zero, group_size=group_size)


def w8a8_matmul(
    x: Rows,
    kernel: Int8[Array, "N K"],
    scale: Float32[Array, " N"],
    input_scale: Float32[Array, " 1"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """int8 weights times int8 activations; every token gets its scale here, or all are given one.

    What a given scale cannot hold is cut off.
    """
    if input_scale is None:
        rows = round_rows(x, jnp.int8, implementation=implementation)
    else:
        rows = reference.round_rows(plain_rows(x), jnp.int8, input_scale)
    return _multiply_rounded(rows, kernel, scale, x.dtype, implementation)


def fp8_matmul(
    x: Rows,
    kernel: Float[Array, "N K"],
    scale: Float32[Array, " N"],
    residual: Float[Array, "T N"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """e4m3 weights times e4m3 activations, which get a scale per token, added to a residual.

    GPUs of a compute capability under 8.9 have no such products and are left to XLA.
    """
    rows = round_rows(x, reference.FP8, implementation=implementation)
    if x.dtype == jnp.bfloat16 and runs_dense(rows.codes, kernel.shape[0], implementation):
        scales = rows.scale, scale
        return dense_matmul(
            rows.codes, kernel, residual=residual, scales=scales, outputs_first=True
        )
    product = _multiply_fp8(rows, kernel, scale, x.dtype, implementation)
    return product if residual is None else residual + product


def fp8_gated(
    x: Rows,
    kernel: Float[Array, "N K"],
    scale: Float32[Array, " N"],
    *,
    implementation: Implementation | None = None,
) -> Gated:
    """What `fp8_matmul` gives, as gates and ups.

    Of many tokens the scales are left to whoever computes the gates: a pass less over the memory.
    """
    rows = round_rows(x, reference.FP8, implementation=implementation)
    is_narrow = _is_given_narrow(rows, x.dtype, implementation)
    if is_narrow and kernel.shape[0] <= 2 * MOST_SCALED:
        return Gated(_multiply_narrow(rows, kernel, x.dtype), (rows.scale, scale))
    return Gated(_multiply_fp8(rows, kernel, scale, x.dtype, implementation))


def _multiply_fp8(
    rows: reference.RoundedRows,
    kernel: Float[Array, "N K"],
    scale: Float32[Array, " N"],
    dtype: jnp.dtype,
    implementation: Implementation | None,
) -> Float[Array, "T N"]:
    if _is_given_narrow(rows, dtype, implementation):
        product = _multiply_narrow(rows, kernel, dtype)
        return reference.apply_scales(product, rows.scale, scale, dtype)
    return _multiply_rounded(rows, kernel, scale, dtype, implementation)


def _is_given_narrow(
    rows: reference.RoundedRows, dtype: jnp.dtype, implementation: Implementation | None
) -> bool:
    """Whether XLA's product is in bfloat16 before its scales: half the bytes of many tokens.

    Against codes of 4 bits of mantissa one more rounding to 8 counts for nothing. Sums of such
    codes are beyond what a float16 holds, and a float32 model wants all of theirs.
    """
    chosen = implementation or choose_implementation(jax.default_backend())
    is_many = rows.codes.shape[0] > MOST_TOKENS
    return is_many and runs_triton(chosen) and _triton.has_fp8() and dtype == jnp.bfloat16


def _multiply_narrow(
    rows: reference.RoundedRows, kernel: Float[Array, "N K"], dtype: jnp.dtype
) -> Float[Array, "T N"]:
    product: jax.Array = lax.dot_general(
        rows.codes, kernel, reference.CONTRACT_LAST, preferred_element_type=dtype
    )
    return product


def _multiply_rounded(
    rows: reference.RoundedRows,
    kernel: Num[Array, "N K"],
    scale: Float32[Array, " N"],
    dtype: jnp.dtype,
    implementation: Implementation | None,
) -> Float[Array, "T N"]:
    is_known = kernel.dtype != reference.FP8 or _triton.has_fp8()
    if is_known and _is_for_triton(rows.codes.shape[0], dtype, implementation):
        return narrow_matmul(rows.codes, kernel, scale, rows.scale, dtype=dtype)
    return reference.multiply_rounded(rows, kernel, scale, dtype)


def _is_for_triton(
    num_tokens: int, dtype: jnp.dtype, implementation: Implementation | None
) -> bool:
    """Few tokens; float32 has no fast tensor cores and is left to XLA."""
    chosen = implementation or choose_implementation(jax.default_backend())
    return runs_triton(chosen) and num_tokens <= MOST_TOKENS and dtype != jnp.float32
