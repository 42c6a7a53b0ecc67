"""The one place where projections happen: y = x @ kernel (+ bias), kernels stored [in, out].

A projection also does what follows it, where that is the same kernel's work: see `added`, `gated`.

Quantised formats are further parameter forms: a packed kernel stored [out, in], its scales, and
for int4 its zero points and, where the file had one, the order of its inputs. `quantization.py`
says what formats there are, `kernels` multiplies.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from swiftjax import kernels
from swiftjax.quantization import WeightFormat


def packed_params(form: WeightFormat, in_dim: int, out_dim: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Names, shapes and dtypes of what stands in the place of a dense kernel."""
    if form.kind == "int4":
        words = kernels.packed_int4.words_per_row(in_dim)
        groups = -(-in_dim // form.group_size)
        order = {"kernel_order": jax.ShapeDtypeStruct((in_dim,), jnp.int32)}
        return (order if form.act_order else {}) | {
            "kernel": jax.ShapeDtypeStruct((out_dim, words), jnp.int32),
            "kernel_scale": jax.ShapeDtypeStruct((groups, out_dim), jnp.float32),
            "kernel_zero": jax.ShapeDtypeStruct((groups, out_dim), jnp.uint8),
        }
    stored = jnp.float8_e4m3fn if form.kind == "fp8" else jnp.int8
    input_scale = {"kernel_input_scale": jax.ShapeDtypeStruct((1,), jnp.float32)}
    return (input_scale if form.static else {}) | {
        "kernel": jax.ShapeDtypeStruct((out_dim, in_dim), stored),
        "kernel_scale": jax.ShapeDtypeStruct((out_dim,), jnp.float32),
    }


class Linear(nnx.Module):
    """A projection; the product is accumulated in float32 and returned in x's dtype."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        use_bias: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        form: WeightFormat | None = None,
    ) -> None:
        self.form = form
        if form is None:
            init = jax.nn.initializers.normal(in_dim**-0.5)
            values = {"kernel": init(rngs.params(), (in_dim, out_dim), dtype)}
        else:
            likes = packed_params(form, in_dim, out_dim)
            values = {name: jnp.zeros(like.shape, like.dtype) for name, like in likes.items()}
        parts = {name: nnx.Param(value) for name, value in values.items()}
        self.kernel = parts["kernel"]
        self.kernel_scale = parts.get("kernel_scale")
        self.kernel_zero = parts.get("kernel_zero")
        self.kernel_order = parts.get("kernel_order")
        self.kernel_input_scale = parts.get("kernel_input_scale")
        self.bias = nnx.Param(jnp.zeros((out_dim,), dtype)) if use_bias else None

    def __call__(
        self, x: kernels.Rows, implementation: kernels.Implementation | None = None
    ) -> Float[Array, "T out"]:
        """Project every row; `implementation` None is the platform's own."""
        y = self._product(x, None, implementation)
        return y if self.bias is None else y + self.bias[...][None, :]

    def added(
        self,
        residual: Float[Array, "T out"],
        x: kernels.Rows,
        implementation: kernels.Implementation | None = None,
    ) -> Float[Array, "T out"]:
        """Project every row and add it to a residual."""
        if self.bias is None:
            return self._product(x, residual, implementation)
        return residual + self(x, implementation)

    def gated(
        self, x: kernels.Rows, implementation: kernels.Implementation | None = None
    ) -> kernels.Gated | Float[Array, "T columns"]:
        """Project every row to gates and ups: silu(gate) * up, for the projection that follows."""
        kind = None if self.form is None else self.form.kind
        if self.bias is not None or kind not in (None, "fp8"):
            return kernels.Gated(self(x, implementation))
        if self.kernel_scale is None:
            rows = kernels.plain_rows(x, implementation)
            return kernels.gated_matmul(rows, self.kernel[...], implementation=implementation)
        kernel, scale = self.kernel[...], self.kernel_scale[...]
        return kernels.fp8_gated(x, kernel, scale, implementation=implementation)

    def _product(
        self,
        x: kernels.Rows,
        residual: Float[Array, "T out"] | None,
        implementation: kernels.Implementation | None,
    ) -> Float[Array, "T out"]:
        kernel = self.kernel[...]
        if self.form is None:
            rows = kernels.plain_rows(x, implementation)
            return kernels.matmul(rows, kernel, residual, implementation=implementation)
        if self.form.kind == "fp8":
            assert self.kernel_scale is not None
            scale = self.kernel_scale[...]
            return kernels.fp8_matmul(x, kernel, scale, residual, implementation=implementation)
        product = self._quantized(x, self.form, implementation)
        return product if residual is None else residual + product

    def _quantized(
        self,
        x: kernels.Rows,
        form: WeightFormat,
        implementation: kernels.Implementation | None,
    ) -> Float[Array, "T out"]:
        assert self.kernel_scale is not None
        kernel, scale = self.kernel[...], self.kernel_scale[...]
        if form.kind == "w8a8":
            static = None if self.kernel_input_scale is None else self.kernel_input_scale[...]
            return kernels.w8a8_matmul(x, kernel, scale, static, implementation=implementation)
        x = kernels.plain_rows(x, implementation)
        if self.kernel_zero is None:
            return kernels.int8_matmul(x, kernel, scale, implementation=implementation)
        if self.kernel_order is not None:
            x = x.at[:, self.kernel_order[...]].get(mode="clip")
        return kernels.int4_matmul(
            x,
            kernel,
            scale,
            self.kernel_zero[...],
            group_size=form.group_size,
            implementation=implementation,
        )
