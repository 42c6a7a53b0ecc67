"""The one place where projections happen: y = x @ kernel (+ bias), kernels stored [in, out].

Wide formats of the weights (int8, int4, fp8) will be further parameter forms of this module.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


def dot_precision(dtype: jnp.dtype) -> lax.Precision:
    """Full float32 for float32: a GPU's default is TF32, which keeps 10 bits of each factor."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


class Linear(nnx.Module):
    """A dense projection; the product is accumulated in float32 and returned in x's dtype."""

    def __init__(
        self, in_dim: int, out_dim: int, *, use_bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        init = jax.nn.initializers.normal(in_dim**-0.5)
        self.kernel = nnx.Param(init(rngs.params(), (in_dim, out_dim), dtype))
        self.bias = nnx.Param(jnp.zeros((out_dim,), dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        """Project every row."""
        y = jnp.dot(x, self.kernel[...], precision=dot_precision(x.dtype))
        return y if self.bias is None else y + self.bias[...][None, :]
