"""Products with quantised weights: the ops that the model's projections call.

Each picks its implementation; what the products mean, and the layouts, stands in
`quantized_reference.py`. A kernel serves the row counts at which it was measured to be fastest.
"""

from jaxtyping import Array, Float, Float32, Int8, Int32, UInt8

from swiftjax.kernels import quantized_reference as reference
from swiftjax.kernels.implementation import Implementation


def int8_matmul(
    x: Float[Array, "T K"],
    kernel: Int8[Array, "N K"],
    scale: Float32[Array, " N"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """x @ (kernel * scale).T with weights of 8 bits and activations as they are."""
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
    return reference.int4_matmul(x, kernel, scale, zero, group_size=group_size)


def w8a8_matmul(
    x: Float[Array, "T K"],
    kernel: Int8[Array, "N K"],
    scale: Float32[Array, " N"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """int8 weights times int8 activations; every token gets its scale here."""
    return reference.w8a8_matmul(x, kernel, scale)


def fp8_matmul(
    x: Float[Array, "T K"],
    kernel: Float[Array, "N K"],
    scale: Float32[Array, " N"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """e4m3 weights times e4m3 activations; every token gets its scale here."""
    return reference.fp8_matmul(x, kernel, scale)
