"""The values integer weights may take: a scale and a zero point per output and group of inputs.

Works on the device, for the methods that look for better codes than the nearest ones. Matrices are
[outputs, inputs] in float32; a last group may be short and is padded with zeros, which stay zero.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from swiftjax.quantization import WeightFormat

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32
# How far a range is drawn in, at most, where that makes the product better.
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


class Shape(NamedTuple):
    """What codes there are; `group` inputs share a scale, all of them with 0."""

    low: int
    high: int
    group: int
    symmetric: bool


class Grid(NamedTuple):
    """Code c of a group stands for scale * (c - zero)."""

    scale: Float32[Array, "N G"]
    zero: Float32[Array, "N G"]


def shape_of(form: WeightFormat, *, symmetric: bool) -> Shape:
    """The codes of an integer format: 8 bits are always symmetric and have no groups."""
    if form.kind == "int4":
        return Shape(0, 15, form.group_size, symmetric)
    return Shape(-127, 127, 0, True)


def widest_grid(weights: Float32[Array, "N K"], shape: Shape, shrink: float = 1.0) -> Grid:
    """The grid whose range holds every weight, drawn in by `shrink`; it always contains zero."""
    groups = grouped(weights, shape)
    if shape.symmetric:
        middle = 0.0 if shape.low < 0 else (shape.low + shape.high + 1) / 2
        peak = jnp.abs(groups).max(axis=2) * shrink
        scale = jnp.maximum(peak / (shape.high - middle), SMALLEST_SCALE)
        return Grid(scale, jnp.full_like(scale, middle))
    low, high = (jnp.minimum(groups.min(axis=2), 0.0), jnp.maximum(groups.max(axis=2), 0.0))
    # Halved first: the difference of two large numbers must not become infinite.
    span = (high / 2 - low / 2) * shrink
    scale = jnp.maximum(span / ((shape.high - shape.low) / 2), SMALLEST_SCALE)
    zero = jnp.clip(jnp.round(-low * shrink / scale), shape.low, shape.high)
    return Grid(scale, zero)


@partial(jax.jit, static_argnums=2)
def best_grid(weights: Float32[Array, "N K"], moments: Float32[Array, "K K"], shape: Shape) -> Grid:
    """Draw every group's range in as far as makes the product of the group best.

    The error of a group is d @ M @ d, d being the error of its weights and M the mean of products
    of its inputs: what rounding changes in the output, where other groups are exact.
    """
    blocks = _diagonal_blocks(moments, shape)
    groups = grouped(weights, shape)
    best, least = widest_grid(weights, shape), jnp.full(groups.shape[:2], jnp.inf, jnp.float32)
    for shrink in SHRINKS:
        grid = widest_grid(weights, shape, shrink)
        wrong = grouped(rounded(weights, grid, shape), shape) - groups
        error = jnp.einsum("ngi,gij->ngj", wrong, blocks, precision=lax.Precision.HIGHEST)
        error = (error * wrong).sum(axis=2)
        better = error < least
        best = Grid(*(jnp.where(better, new, old) for new, old in zip(grid, best, strict=True)))
        least = jnp.minimum(error, least)
    return best


def codes_of(weights: Float32[Array, "N K"], grid: Grid, shape: Shape) -> Float32[Array, "N K"]:
    """The nearest codes."""
    scale, zero = (spread(part, weights.shape[1], shape) for part in grid)
    return jnp.clip(jnp.round(weights / scale) + zero, shape.low, shape.high)


def rounded(weights: Float32[Array, "N K"], grid: Grid, shape: Shape) -> Float32[Array, "N K"]:
    """The nearest values."""
    scale, zero = (spread(part, weights.shape[1], shape) for part in grid)
    return (codes_of(weights, grid, shape) - zero) * scale


def spread(part: Float32[Array, "N G"], num_inputs: int, shape: Shape) -> Float32[Array, "N K"]:
    """Repeat what groups have for each of their inputs."""
    size = shape.group or num_inputs
    return jnp.repeat(part, size, axis=1)[:, :num_inputs]


def grouped(weights: Float32[Array, "N K"], shape: Shape) -> Float32[Array, "N G I"]:
    """Cut the inputs into groups."""
    num_outputs, num_inputs = weights.shape
    size = shape.group or num_inputs
    padding = -num_inputs % size
    return jnp.pad(weights, ((0, 0), (0, padding))).reshape(num_outputs, -1, size)


def _diagonal_blocks(moments: Float32[Array, "K K"], shape: Shape) -> Float32[Array, "G I I"]:
    size = shape.group or moments.shape[0]
    padding = -moments.shape[0] % size
    padded = jnp.pad(moments, ((0, padding), (0, padding)))
    count = padded.shape[0] // size
    cells = padded.reshape(count, size, count, size)
    every = jnp.arange(count, dtype=jnp.int32)
    return cells[every, :, every, :]
