"""Products of the tensor cores for kernels on Mosaic GPU: a part of the seam (`_mosaic.py`).

A warpgroup starts them and goes on; who may touch what they read then is its own to know. In the
simulation they are computed plainly, at once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swiftjax.kernels import _triton

wait_products = plgpu.wgmma_wait


def product(a: Any, b: Any, meanwhile: Callable[[], None]) -> jax.Array:
    """a [R H] times b [C H] transposed, both in shared memory, in float32.

    `meanwhile` runs after the tensor cores got the work and before they are waited for.
    """
    shape = (a.shape[0], b.shape[0])
    if _triton.is_interpreted():
        out = jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32)
        meanwhile()
        return out

    def run(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, a, b.transpose((1, 0)))
        meanwhile()
        return sums[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


Add = Callable[[int, jax.Array, Any], None]


def add_up(shape: tuple[int, int], run: Callable[[Add], None]) -> jax.Array:
    """Sum up products [R S] in float32, and wait for them.

    `run(add)` calls `add(first, a, b)`: to 64 rows from the `first` on goes a [64 C] in registers
    times b [S C] transposed, in shared memory. The tensor cores may still work on it when that
    returns: see `wait_products`.
    """
    if _triton.is_interpreted():
        return _simulated_sum(jnp.zeros(shape, jnp.float32), run)

    def scoped(sums: Any) -> jax.Array:
        def add(first: int, a: jax.Array, b: Any) -> None:
            rows = sums if a.shape[0] == shape[0] else sums.at[pl.ds(first, a.shape[0])]
            plgpu.wgmma(rows, a, b.transpose((1, 0)))

        run(add)
        return sums[...]

    return pl.run_scoped(scoped, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_up_trips(
    shape: tuple[int, int], begin: Any, end: Any, trip: Callable[[Any, Add], None]
) -> jax.Array:
    """Sum up the products that `trip(number, add)` adds, from trip to trip without waiting."""
    if _triton.is_interpreted():

        def simulated(number: Any, sums: jax.Array) -> jax.Array:
            return _simulated_sum(sums, lambda add: trip(number, add))

        return lax.fori_loop(begin, end, simulated, jnp.zeros(shape, jnp.float32))
    return add_up(shape, lambda add: pl.loop(begin, end)(lambda number: trip(number, add)))


AddShared = Callable[[int, Any, Any], None]


def add_up_shared(
    shape: tuple[int, int], trips: int, trip: Callable[[Any, AddShared], None], *, turned: bool
) -> jax.Array:
    """Sum up products [R C] in float32, of operands that are both in shared memory.

    `trip(number, add)` calls `add(first, a, b)`: to the columns from the `first` on goes a [R S]
    times b [S c], or b [c S] transposed if it is `turned`. The tensor cores may still work on it
    when that returns: see `wait_products`.
    """
    if _triton.is_interpreted():

        def simulated(number: Any, sums: jax.Array) -> jax.Array:
            parts = [sums]

            def add(first: int, a: Any, b: Any) -> None:
                factor = b[...].T if turned else b[...]
                part = jnp.dot(a[...], factor, preferred_element_type=jnp.float32)
                rest = shape[1] - first - part.shape[1]
                parts.append(jnp.pad(part, ((0, 0), (first, rest))))

            trip(number, add)
            return functools.reduce(jnp.add, parts)

        return lax.fori_loop(0, trips, simulated, jnp.zeros(shape, jnp.float32))

    def scoped(sums: Any) -> jax.Array:
        def add(first: int, a: Any, b: Any) -> None:
            factor = b.transpose((1, 0)) if turned else b
            count = factor.shape[1]
            columns = sums if count == shape[1] else sums.at[:, pl.ds(first, count)]
            plgpu.wgmma(columns, a, factor)

        pl.loop(0, trips)(lambda number: trip(number, add))
        return sums[...]

    return pl.run_scoped(scoped, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _simulated_sum(sums: jax.Array, run: Callable[[Add], None]) -> jax.Array:
    parts = [sums]

    def add(first: int, a: jax.Array, b: Any) -> None:
        part = jnp.dot(a, b[...].T, preferred_element_type=jnp.float32)
        rest = sums.shape[0] - first - a.shape[0]
        parts.append(jnp.pad(part, ((first, rest), (0, 0))))

    run(add)
    return functools.reduce(jnp.add, parts)


def add_product(sums: jax.Array, a: jax.Array, b: Any) -> jax.Array:
    """sums [R H] plus a [R C], in registers, times b [C H] in shared memory."""
    if _triton.is_interpreted():
        return sums + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    run: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
    return run(plgpu.WGMMAAccumulatorRef.init(sums))
