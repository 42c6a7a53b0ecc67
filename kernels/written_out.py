"""Products of many tokens with 4-bit weights: the weights are written out, then XLA multiplies.

Left to itself XLA unpacks inside the product, or unpacks the weights of all layers long before they
are multiplied and keeps them: 0.45 GiB a layer of 8B parameters. Used by `quantized_matmul.py`;
the product's meaning is `quantized_reference.int4_matmul`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from swiftjax.kernels import packed_int4
from swiftjax.kernels.quantized_reference import CONTRACT_LAST


def multiply_written_out(
    x: Float[Array, "T K"],
    kernel: Int32[Array, "N words"],
    scale: Float[Array, "G N"],
    zero: UInt8[Array, "G N"],
    *,
    group_size: int,
) -> Float[Array, "T N"]:
    """x @ weights.T; the weights have the type of `x`, and live from `x` to the product."""
    x, kernel = lax.optimization_barrier((x, kernel))
    # Turned before: a product with what is turned would be written in small pieces.
    scale, zero = (array.T for array in lax.optimization_barrier((scale.T, zero.T)))
    weights = packed_int4.dequantize(
        kernel, scale, zero, num_inputs=x.shape[1], group_size=group_size
    )
    weights = lax.optimization_barrier(weights.astype(x.dtype))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product: jax.Array = lax.dot_general(x, weights, CONTRACT_LAST, precision=precision)
    return product
