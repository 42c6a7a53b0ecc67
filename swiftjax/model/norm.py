"""The norm in front of every projection, which may be computed by whoever multiplies its rows."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from swiftjax import kernels


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalise the last axis."""
        return kernels.rms_norm(x, self.scale[...], self.eps)

    def lazy(self, x: Float[Array, "T D"]) -> kernels.Normed:
        """Leave it to the projection that reads the rows: it may want them in 8 bits."""
        return kernels.Normed(x=x, scale=self.scale[...], eps=self.eps)
