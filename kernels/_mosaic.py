"""The seam to Pallas on Mosaic GPU; `_mosaic_products.py` and `_mosaic_registers.py` are the rest.

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
