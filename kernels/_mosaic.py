"""The seam to Pallas on Mosaic GPU: with `_mosaic_registers.py` all that imports it.

A program here is several warpgroups that each run a part of their own and meet at barriers: what
Triton cannot say, and what a Hopper GPU needs to keep its tensor cores busy. On a CPU kernels run
in jax's simulation of threads, memories and barriers; that knows neither register layouts nor
tensor cores, so layouts are left out and products computed plainly there.
"""

import functools
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swiftjax.kernels import _triton

# An H200's; only the order of work depends on it.
NUM_MULTIPROCESSORS = 132

# jax 0.10 wants an index, and 0.11 warns of one.
NO_INDEX = ((),) if signature(plgpu.load).parameters["idx"].default is Parameter.empty else ()

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


def known_cluster(size: int) -> int:
    """Programs that a cluster of `size` is here: the simulation of jax 0.10 knows no clusters."""
    return 1 if _triton.is_interpreted() else size


def number_in_cluster(size: int) -> Any:
    """Which of the programs of a cluster this is."""
    return 0 if size == 1 else lax.axis_index("neighbour")


def cluster_barrier(size: int, *, num_arrivals: int, num_barriers: int) -> Any:
    """Barriers at which all programs of a cluster arrive; each waits at its own."""
    if size == 1:
        return Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)
    return plgpu.ClusterBarrier(
        collective_axes=("neighbour",), num_arrivals=num_arrivals, num_barriers=num_barriers
    )


def copy_in_cluster(size: int, source: Any, target: Any, barrier: Any) -> None:
    """Copy the same into all programs of a cluster, each of which brings a part of it."""
    copy_in(source, target, barrier, collective_axes=None if size == 1 else "neighbour")


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
    """Load one number for each row of a matrix, from plain shared or device memory."""
    if _triton.is_interpreted():
        return ref[...]
    return plgpu.load(ref, *NO_INDEX, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def load_row(ref: Any) -> jax.Array:
    """Load one number for each column of a matrix, from shared or device memory."""
    if _triton.is_interpreted():
        return ref[...]
    return plgpu.load(ref, *NO_INDEX, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def load_matrix(ref: Any) -> jax.Array:
    """Load a matrix from device memory, laid out as products are."""
    if _triton.is_interpreted():
        return ref[...]
    return plgpu.load(ref, *NO_INDEX, layout=plgpu.Layout.WGMMA, optimized=False)


def store_transposed(ref: Any, x: jax.Array) -> None:
    """Store x [R C] of a warpgroup's registers into shared memory [C R]."""
    if _triton.is_interpreted():
        ref[...] = x.T
    else:
        turned = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        ref.transpose((1, 0))[...] = turned


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


def launch(
    kernel: Callable[..., None],
    arguments: Sequence[jax.Array],
    output: jax.ShapeDtypeStruct,
    *,
    scratch: Sequence[Any],
    num_programs: int,
    num_warpgroups: int,
    cluster: int = 1,
) -> jax.Array:
    """Run `kernel(*argument_refs, output_ref, *scratch_refs)` in every program.

    `jax.lax.axis_index` tells a "program" and a "warpgroup" their numbers. Of programs in clusters
    that is the cluster's, and "neighbour" the number in it.
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
        **({} if cluster == 1 else {"cluster": (cluster,), "cluster_names": ("neighbour",)}),
        **_simulation(),
    )(*arguments)


def _simulation() -> dict[str, Any]:
    if not _triton.is_interpreted():
        return {}
    # Public since jax 0.11 only.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return {"interpret": InterpretGPUParams()}
