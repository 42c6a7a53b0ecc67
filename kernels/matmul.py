"""Products with weights as they are: the ops that the model's projections call.

In plain jnp, which says what they mean, or by `dense_matmul.py` where that is faster.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from swiftjax.kernels.dense_matmul import dense_matmul, is_dense_faster
from swiftjax.kernels.dense_work import CLUSTER, ROWS, choose_dense_tile
from swiftjax.kernels.implementation import Implementation, choose_implementation
from swiftjax.kernels.rounded_rows import Gated

# Rows that the smallest tiles fill: "invariant" fills up every product to a multiple of them.
FILLED_ROWS = CLUSTER * ROWS


def dot_precision(dtype: jnp.dtype) -> lax.Precision:
    """Full float32 for float32: a GPU's default is TF32, which keeps 10 bits of each factor."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def matmul(
    x: Float[Array, "T K"],
    kernel: Float[Array, "K N"] | Float[Array, "N K"],
    residual: Float[Array, "T N"] | None = None,
    *,
    outputs_first: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "T N"]:
    """x @ kernel, added to a residual; sums are float32, the result has the dtype of `x`.

    A kernel with its outputs first is [N K].
    """
    if implementation == "invariant":
        return _multiply_filled(x, kernel, residual, outputs_first=outputs_first)
    num_outputs = kernel.shape[0 if outputs_first else 1]
    if runs_dense(x, num_outputs, implementation):
        return dense_matmul(x, kernel, residual=residual, outputs_first=outputs_first)
    contracted = (((1,), (1 if outputs_first else 0,)), ((), ()))
    product: jax.Array = lax.dot_general(x, kernel, contracted, precision=dot_precision(x.dtype))
    return product if residual is None else residual + product


def gated_matmul(
    x: Float[Array, "T K"],
    kernel: Float[Array, "K N"],
    *,
    implementation: Implementation | None = None,
) -> Gated | Float[Array, "T columns"]:
    """silu(gate) * up [T N/2] of x @ kernel, whose columns are gates, then ups."""
    if implementation == "invariant":
        return _multiply_filled(x, kernel, gated=True)
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


def knows_invariant(
    num_inputs: int, num_outputs: int, dtype: jnp.dtype, *, gated: bool = False
) -> bool:
    """Whether "invariant" computes such a product: of 16 bits, with inputs and outputs in tiles."""
    tile = choose_dense_tile(FILLED_ROWS, num_inputs * dtype.itemsize, num_outputs, gated=gated)
    return dtype.itemsize == 2 and tile is not None


def _multiply_filled(
    x: Float[Array, "T K"],
    kernel: Float[Array, "K N"] | Float[Array, "N K"],
    residual: Float[Array, "T N"] | None = None,
    *,
    outputs_first: bool = False,
    gated: bool = False,
) -> Float[Array, "T columns"]:
    """By Mosaic's kernel, whatever the number of rows.

    All its tiles add up a sum in the same order, so a row's bits depend on the row alone.
    """
    missing = ((0, -x.shape[0] % FILLED_ROWS), (0, 0))
    out = dense_matmul(
        jnp.pad(x, missing),
        kernel,
        residual=None if residual is None else jnp.pad(residual, missing),
        outputs_first=outputs_first,
        gated=gated,
    )
    return out[: x.shape[0]]
