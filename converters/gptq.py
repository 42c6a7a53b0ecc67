"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): codes that make up for each other's errors.

Inputs are rounded one after the other, those with the largest moments first, and the error of each
is taken out of the weights of those that follow. Scales and zero points are fixed beforehand, so
that groups stay groups of neighbours in spite of the order. Called by `calibration.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from swiftjax.converters.grids import Grid, Shape, spread

BLOCK = 128  # inputs whose errors are collected before the rest of the matrix is touched
DAMPING = 0.01  # of the mean moment, added to each input's own

product = partial(jnp.dot, precision=lax.Precision.HIGHEST)


@partial(jax.jit, static_argnums=3)
def gptq_codes(
    weights: Float32[Array, "N K"], moments: Float32[Array, "K K"], grid: Grid, shape: Shape
) -> Float32[Array, "N K"]:
    """Codes of a matrix [outputs, inputs] whose inputs have the moments x.T @ x."""
    num_inputs = weights.shape[1]
    order = jnp.argsort(-jnp.diagonal(moments))
    scale, zero = (spread(part, num_inputs, shape)[:, order] for part in grid)
    factor = inverse_factor(moments[order][:, order])
    padding = -num_inputs % BLOCK
    wide = ((0, 0), (0, padding))
    factor = jnp.pad(factor, ((0, padding), (0, padding)))
    # Padding rounds to itself: no error, whatever stands on the diagonal.
    spare = jnp.arange(factor.shape[0], dtype=jnp.int32) >= num_inputs
    factor = factor + jnp.diag(spare.astype(jnp.float32))
    codes = _round_in_order(
        jnp.pad(weights[:, order], wide),
        jnp.pad(scale, wide, constant_values=1.0),
        jnp.pad(zero, wide),
        factor,
        shape,
    )[:, :num_inputs]
    return jnp.zeros_like(codes).at[:, order].set(codes)


def inverse_factor(moments: Float32[Array, "K K"]) -> Float32[Array, "K K"]:
    """The upper triangle U with inverse(moments + damping) = U.T @ U.

    Made from the Cholesky factor of the matrix read backwards, whose inverse is U: the inverse
    itself, and a second factorisation that could fail, are not needed.
    """
    size = moments.shape[0]
    damping = DAMPING * jnp.trace(moments) / size + jnp.float32(1e-12)
    damped = moments + damping * jnp.eye(size, dtype=jnp.float32)
    upper = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(upper, jnp.eye(size, dtype=jnp.float32))


def _round_in_order(
    weights: Float32[Array, "N K"],
    scale: Float32[Array, "N K"],
    zero: Float32[Array, "N K"],
    factor: Float32[Array, "K K"],
    shape: Shape,
) -> Float32[Array, "N K"]:
    num_outputs, num_inputs = weights.shape

    def columns(x: Array, start: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, start, BLOCK, axis=1)

    def block(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        weights, codes = state
        start = i * BLOCK
        rows = lax.dynamic_slice_in_dim(factor, start, BLOCK)
        inner = columns(rows, start)
        scales, zeros = columns(scale, start), columns(zero, start)

        def one(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            part, found, errors = state
            code = jnp.round(part[:, j] / scales[:, j]) + zeros[:, j]
            code = jnp.clip(code, shape.low, shape.high)
            error = (part[:, j] - (code - zeros[:, j]) * scales[:, j]) / inner[j, j]
            part = part - error[:, None] * inner[j][None, :]
            return part, found.at[:, j].set(code), errors.at[:, j].set(error)

        empty = jnp.zeros((num_outputs, BLOCK), jnp.float32)
        _, found, errors = lax.fori_loop(0, BLOCK, one, (columns(weights, start), empty, empty))
        # Columns of this block change too, but are not looked at again.
        weights = weights - product(errors, rows)
        return weights, lax.dynamic_update_slice_in_dim(codes, found, start, axis=1)

    state = (weights, jnp.zeros_like(weights))
    return lax.fori_loop(0, num_inputs // BLOCK, block, state)[1]
