"""Products with weights as they are: the ops that the model's projections call.

In plain jnp, which says what they mean, or by `dense_matmul.py` where that is faster.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from swiftjax.kernels.dense_matmul import dense_matmul, is_dense_faster
from swiftjax.kernels.implementation import Implementation, choose_implementation
from swiftjax.kernels.rounded_rows import Gated, Rows


def dot_precision(dtype: jnp.dtype) -> lax.Precision:
    """Full float32 for float32: a GPU's default is TF32, which keeps 10 bits of each factor."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def matmul(
    x: Float[Array, "T K"],
    kernel: Float[Array, "K N"],
    residual: Float[Array, "T N"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """x @ kernel, added to a residual; sums are float32, the result has the dtype of `x`."""
    if runs_dense(x, kernel.shape[1], implementation):
        return dense_matmul(x, kernel, residual=residual)
    product = jnp.dot(x, kernel, precision=dot_precision(x.dtype))
    return product if residual is None else residual + product


def gated_matmul(
    x: Float[Array, "T K"],
    kernel: Float[Array, "K N"],
    *,
    implementation: Implementation | None = None,
) -> Rows:
    """silu(gate) * up [T N/2] of x @ kernel, whose columns are gates, then ups."""
    if runs_dense(x, kernel.shape[1], implementation, gated=True):
        return dense_matmul(x, kernel, gated=True)
    return Gated(matmul(x, kernel, implementation=implementation))


def runs_dense(
    x: Float[Array, "T K"],
    num_outputs: int,
    implementation: Implementation | None,
    *,
    gated: bool = False,
) -> bool:
    """Whether Mosaic's kernel computes such a product."""
    chosen = implementation or choose_implementation(jax.default_backend())
    (num_tokens, num_inputs), dtype = x.shape, x.dtype
    return chosen == "mosaic" and is_dense_faster(
        num_tokens, num_inputs, num_outputs, dtype, gated=gated
    )
