"""The seam to Pallas on Mosaic GPU: the only file that imports `pallas.mosaic_gpu`.

A program here is several warpgroups that each run a part of their own and meet at barriers: what
Triton cannot say, and what a Hopper GPU needs to keep its tensor cores busy. On a CPU kernels run
in jax's simulation of threads, memories and barriers; that knows neither register layouts nor
tensor cores, so layouts are left out and products computed plainly there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swiftjax.kernels import _triton

# An H200's; only the order of work depends on it.
NUM_MULTIPROCESSORS = 132

arrive = plgpu.barrier_arrive
wait = plgpu.barrier_wait
copy_in = plgpu.copy_gmem_to_smem
copy_out = plgpu.copy_smem_to_gmem
commit = plgpu.commit_smem
wait_copies_out = plgpu.wait_smem_to_gmem
wait_copies_read = functools.partial(plgpu.wait_smem_to_gmem, wait_read_only=True)
wait_products = plgpu.wgmma_wait
set_max_registers = plgpu.set_max_registers
Barrier = plgpu.Barrier


def tiles(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory laid out as the tensor cores read it."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    )


def words(shape: tuple[int, ...]) -> Any:
    """Shared memory for packed weights, 16 words of 32 bits a row, read without bank conflicts."""
    return plgpu.SMEM(
        shape,
        jnp.int32,
        transforms=(plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(64)),
    )


def lines(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory row by row, of which single rows can be copied."""
    return plgpu.SMEM(shape, dtype)


def num_multiprocessors() -> int:
    """Programs of a kernel that fills the device with one on each; one in the simulation."""
    if _triton.is_interpreted():
        return 1
    return getattr(jax.devices()[0], "core_count", NUM_MULTIPROCESSORS)


def matrix(x: jax.Array) -> jax.Array:
    """Lay a matrix out over a warpgroup's registers as its products are."""
    return x if _triton.is_interpreted() else plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def column(x: jax.Array) -> jax.Array:
    """Lay out one number for each row of such a matrix."""
    if _triton.is_interpreted():
        return x
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(1))


def numbers(shape: tuple[int, int], axis: int) -> jax.Array:
    """Row or column numbers of a matrix, int32."""
    return matrix(lax.broadcasted_iota(jnp.int32, shape, axis))


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


def load_column(ref: Any) -> jax.Array:
    """Load one number for each row of a matrix, from plain shared memory."""
    if _triton.is_interpreted():
        return ref[...]
    return plgpu.load(ref, (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def store_transposed(ref: Any, x: jax.Array) -> None:
    """Store x [R C] of a warpgroup's registers into shared memory [C R]."""
    if _triton.is_interpreted():
        ref[...] = x.T
    else:
        turned = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        ref.transpose((1, 0))[...] = turned


def join(parts: Sequence[jax.Array]) -> jax.Array:
    """Put matrices in registers side by side."""
    if _triton.is_interpreted():
        return jnp.concatenate(parts, axis=1)
    rows, columns = parts[0].shape
    whole = plgpu.ShapeDtypeStruct(
        (rows, columns * len(parts)), parts[0].dtype, layout=plgpu.Layout.WGMMA
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * len(parts), return_type=whole)
    def side_by_side(_: Any, *pieces: Any) -> Any:
        registers = np.concatenate([piece.registers for piece in pieces], axis=1)
        return type(pieces[0])(
            _registers=registers, _layout=pieces[0].layout, _is_signed=pieces[0].is_signed
        )

    return side_by_side(*parts)


def sum_products(
    shape: tuple[int, int],
    begin: Any,
    end: Any,
    trip: Callable[[Any, Callable[[int, jax.Array, Any], None]], None],
) -> jax.Array:
    """Sum up products [R S] over trips, in float32.

    `trip(number, add)` calls `add(first, a, b)`: to 64 rows from the `first` on goes a [64 C] in
    registers times b [S C] transposed, in shared memory. The tensor cores may still work on it when
    that returns: see `wait_products`.
    """
    if _triton.is_interpreted():

        def simulated(number: Any, sums: jax.Array) -> jax.Array:
            parts = [sums]

            def add(first: int, a: jax.Array, b: Any) -> None:
                part = jnp.dot(a, b[...].T, preferred_element_type=jnp.float32)
                above = (first, shape[0] - first - a.shape[0])
                parts.append(jnp.pad(part, (above, (0, 0))))

            trip(number, add)
            return functools.reduce(jnp.add, parts)

        return lax.fori_loop(begin, end, simulated, jnp.zeros(shape, jnp.float32))

    def run(sums: Any) -> jax.Array:
        def add(first: int, a: jax.Array, b: Any) -> None:
            rows = sums if a.shape[0] == shape[0] else sums.at[pl.ds(first, a.shape[0])]
            plgpu.wgmma(rows, a, b.transpose((1, 0)))

        pl.loop(begin, end)(lambda number: trip(number, add))
        return sums[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_product(sums: jax.Array, a: jax.Array, b: Any) -> jax.Array:
    """sums [R H] plus a [R C], in registers, times b [C H] in shared memory."""
    if _triton.is_interpreted():
        return sums + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    run: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
    return run(plgpu.WGMMAAccumulatorRef.init(sums))


def launch(
    kernel: Callable[..., None],
    arguments: Sequence[jax.Array],
    output: jax.ShapeDtypeStruct,
    *,
    scratch: Sequence[Any],
    num_programs: int,
    num_warpgroups: int,
) -> jax.Array:
    """Run `kernel(*argument_refs, output_ref, *scratch_refs)` in every program.

    `jax.lax.axis_index` tells a "program" and a "warpgroup" their numbers.
    """

    def body(*refs: Any) -> None:
        pl.run_scoped(lambda *scoped: kernel(*refs, *scoped), *scratch, collective_axes="warpgroup")

    return plgpu.kernel(
        body,
        out_type=output,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        # Lane: register layouts are what we say. Those that jax 0.11 infers by itself do not go
        # together with copies of single rows.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **_simulation(),
    )(*arguments)


def _simulation() -> dict[str, Any]:
    if not _triton.is_interpreted():
        return {}
    # Public since jax 0.11 only.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return {"interpret": InterpretGPUParams()}
