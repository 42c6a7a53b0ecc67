"""Pages in 8 bits: int8 or e4m3 values, and a float32 scale for every token and KV head.

The ops take them wherever they take plain pages. A scale is found when its token is written, so
nothing has to be calibrated, and what a token is stored as depends on no other one. Knows no op.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from swiftjax.kernels.quantized_reference import FP8, SMALLEST_SCALE, largest_value


class QuantizedPages(NamedTuple):
    """Keys or values of one layer; slot s of head k holds values[p, k, s] * scales[p, k, s]."""

    values: Num[Array, "P K S H"]
    scales: Float32[Array, "P K S"]

    @property
    def shape(self) -> tuple[int, ...]:
        """(P, K, S, H), as plain pages have it."""
        return self.values.shape


Pages = Float[Array, "P K S H"] | QuantizedPages


def quantize_heads(
    x: Float[Array, "T K H"], dtype: jnp.dtype
) -> tuple[Num[Array, "T K H"], Float32[Array, "T K"]]:
    """Round each head to 8 bits with the smallest scale that fits; of zeros the scale is tiny."""
    largest = largest_value(dtype)
    wide = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.abs(wide).max(axis=-1) / largest, SMALLEST_SCALE)
    values = jnp.clip(wide / scales[..., None], -largest, largest)
    return (values if dtype == FP8 else jnp.round(values)).astype(dtype), scales


def page_arrays(pages: Pages) -> list[Array]:
    """What a kernel is handed of pages: the values, and their scales where there are any."""
    return list(pages) if isinstance(pages, QuantizedPages) else [pages]


def computed_dtype(pages: Pages, x: Float[Array, "..."]) -> jnp.dtype:
    """The float type that attention over these pages computes in: their own, or that of `x`."""
    return x.dtype if isinstance(pages, QuantizedPages) else pages.dtype
