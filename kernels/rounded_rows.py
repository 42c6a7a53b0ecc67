"""Rounds rows to 8 bits, e4m3 or int8, with a scale each: what a product with such weights reads.

The model hands over rows that are not computed yet: a norm's, or a gate's. Where the product is
computed from 8 bits, one kernel computes and rounds them, a row read once and written once; others
call `plain_rows`. Used by `quantized_matmul.py`; what rounding means is `reference.round_rows`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from swiftjax.kernels import _triton
from swiftjax.kernels import quantized_reference as reference
from swiftjax.kernels.implementation import Implementation, choose_implementation, runs_triton
from swiftjax.kernels.paged_tile import LOG2_E, Ref, pl_range
from swiftjax.kernels.quantized_reference import FP8, RoundedRows
from swiftjax.kernels.reference import rms_norm

# Gates and ups are computed so many columns at a time, 4 by a thread: of a whole row there would be
# room for one program on a multiprocessor, which waits for memory and computes in turn.
STRETCH, STRETCH_WARPS = 2048, 16
# Inputs of a row up to which a kernel also scales gates, whose results stay in registers.
MOST_SCALED = 32768


@partial(jax.tree_util.register_dataclass, data_fields=("x", "scale"), meta_fields=("eps",))
@dataclass(frozen=True, kw_only=True, slots=True)
class Normed:
    """The RMSNorm of rows, left to whoever multiplies it."""

    x: Float[Array, "T K"]
    scale: Float[Array, " K"]
    eps: float

    @property
    def dtype(self) -> jnp.dtype:
        """The type that the norm is rounded to."""
        return self.x.dtype


class Gated(NamedTuple):
    """silu(gate) * up of rows that hold gates, then ups; left to whoever multiplies it.

    With scales, of rows [T] and of columns [2*K], row t is gate_up[t] * scales[0][t] * scales[1].
    """

    gate_up: Float[Array, "T 2*K"]
    scales: tuple[Float32[Array, " T"], Float32[Array, " 2*K"]] | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The type that the product is rounded to."""
        return self.gate_up.dtype


Rows = Float[Array, "T K"] | Normed | Gated


def plain_rows(rows: Rows, implementation: Implementation | None = None) -> Float[Array, "T K"]:
    """Compute rows: in plain jnp, but for some norms.

    Their bits are not to depend on how many rows there are ("invariant"), but XLA sums up in
    another order for another number. And of a row alone it makes two kernels, which take longer.
    """
    if isinstance(rows, Normed):
        chosen = implementation or choose_implementation(jax.default_backend())
        is_alone = runs_triton(chosen) and rows.x.shape[0] == 1
        if chosen == "invariant" or is_alone:
            return norm_by_kernel(rows)
        return rms_norm(rows.x, rows.scale, rows.eps)
    if isinstance(rows, Gated):
        gate_up = rows.gate_up
        if rows.scales is not None:
            gate_up = reference.apply_scales(gate_up, *rows.scales, rows.dtype)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return jax.nn.silu(gate) * up
    return rows


def round_rows(
    rows: Rows, dtype: DTypeLike, *, implementation: Implementation | None = None
) -> RoundedRows:
    """Round rows to `dtype`, int8 or e4m3; GPUs of a capability under 8.9 leave e4m3 to XLA.

    Rows are rounded to their own type first, as everything is that the model computes.
    """
    chosen = implementation or choose_implementation(jax.default_backend())
    if runs_triton(chosen) and (dtype != FP8 or _triton.has_fp8()):
        return rows_by_kernel(rows, dtype)
    return reference.round_rows(plain_rows(rows, chosen), dtype)


def rows_by_kernel(rows: Rows, dtype: DTypeLike) -> RoundedRows:
    """Run the Triton implementation: one program a row.

    A GPU's maximum passes over NaN, whose code is NaN in e4m3 and 0 in int8.
    """
    source = _source_of(rows)
    first = source.arrays[0]
    num_rows, width = first.shape[0], first.shape[1] // source.parts
    whole = _triton.power_of_two(width)
    stretch = min(whole, STRETCH) if source.in_stretches else whole
    warps = min(STRETCH_WARPS, choose_warps(width)) if source.in_stretches else choose_warps(width)
    codes, scale = _triton.launch(
        partial(_kernel, read=source.read, rounded_to=first.dtype, stretch=stretch),
        source.arrays,
        [
            jax.ShapeDtypeStruct((num_rows, width), dtype),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ],
        name="round_rows",
        grid=(num_rows,),
        knobs=_triton.Launch(num_warps=warps, num_stages=1),
    )
    return RoundedRows(codes, scale)


def norm_by_kernel(rows: Normed) -> Float[Array, "T K"]:
    """Run the Triton implementation of a norm: one program a row."""
    num_rows, width = rows.x.shape
    return _triton.launch(
        partial(_norm_kernel, eps=rows.eps),
        [rows.x, rows.scale],
        [jax.ShapeDtypeStruct(rows.x.shape, rows.x.dtype)],
        name="norm_rows",
        grid=(num_rows,),
        knobs=_triton.Launch(num_warps=choose_warps(width), num_stages=1),
    )[0]


def choose_warps(width: int) -> int:
    """Pick warps for 16 values a thread: a row has one program, so it is its latency that counts.

    Depends on the width alone: a row gives the same bits whatever stands beside it.
    """
    return min(32, max(1, _triton.power_of_two(width) // 512))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What the kernel computes a row from: arrays, rows of `parts` times the width; and how."""

    arrays: list[Array]
    parts: int
    read: Callable[..., Array]  # references to the arrays, row, columns; float32 [C]
    in_stretches: bool = False  # some columns of a row can be computed without the others


def _source_of(rows: Rows) -> _Source:
    if isinstance(rows, Normed):
        read = partial(_read_normed, eps=rows.eps)
        return _Source(arrays=[rows.x, rows.scale], parts=1, read=read)
    if isinstance(rows, Gated):
        if rows.scales is None:
            arrays, read = [rows.gate_up], _read_gated
        else:
            arrays, read = [rows.gate_up, *rows.scales], _read_scaled_gated
        return _Source(arrays=arrays, parts=2, read=read, in_stretches=True)
    return _Source(arrays=[rows], parts=1, read=_read_plain)


def _kernel(*refs: Ref, read: Callable[..., Array], rounded_to: jnp.dtype, stretch: int) -> None:
    """Grid (T,): one row, read and computed stretch by stretch; its results stay in registers."""
    *sources, codes_ref, scale_ref = refs
    row, width = pl.program_id(0), codes_ref.shape[1]
    columns = [first + pl_range(stretch) for first in range(0, width, stretch)]
    parts = [read(*sources, row, column, column < width).astype(rounded_to) for column in columns]
    peaks = [jnp.abs(part.astype(jnp.float32)) for part in parts]
    largest = reference.largest_value(codes_ref.dtype)
    peak = reduce(jnp.maximum, peaks).max(axis=0)
    scale = jnp.maximum(peak / largest, reference.SMALLEST_SCALE)
    # No value is more than a last bit above the largest, which rounds to it.
    by = 1 / scale
    for column, part in zip(columns, parts, strict=True):
        values = part.astype(jnp.float32) * by
        if codes_ref.dtype != FP8:
            values = _triton.round_even(values).astype(jnp.int32)
        codes = values.astype(codes_ref.dtype)
        _triton.store(codes_ref.at[row, column], codes, mask=column < width)
    _triton.store(scale_ref.at[row], scale)


def _norm_kernel(x_ref: Ref, norm_ref: Ref, out_ref: Ref, *, eps: float) -> None:
    """Grid (T,): one row."""
    row, width = pl.program_id(0), out_ref.shape[1]
    column = pl_range(_triton.power_of_two(width))
    mask = column < width
    x = _read_normed(x_ref, norm_ref, row, column, mask, eps=eps)
    _triton.store(out_ref.at[row, column], x.astype(out_ref.dtype), mask=mask)


def _read_plain(x_ref: Ref, row: Array, column: Array, mask: Array) -> Array:
    return _triton.load(x_ref.at[row, column], mask=mask, other=0).astype(jnp.float32)


def _read_normed(
    x_ref: Ref, norm_ref: Ref, row: Array, column: Array, mask: Array, *, eps: float
) -> Array:
    x = _read_plain(x_ref, row, column, mask)
    norm = _triton.load(norm_ref.at[column], mask=mask, other=0).astype(jnp.float32)
    return x * lax.rsqrt((x * x).sum(axis=0) / x_ref.shape[1] + eps) * norm


def _read_gated(gate_up_ref: Ref, row: Array, column: Array, mask: Array) -> Array:
    gate = _read_plain(gate_up_ref, row, column, mask)
    up = _read_plain(gate_up_ref, row, column + gate_up_ref.shape[1] // 2, mask)
    return _gate(gate, up)


def _read_scaled_gated(
    gate_up_ref: Ref, row_scale_ref: Ref, scale_ref: Ref, row: Array, column: Array, mask: Array
) -> Array:
    row_scale, parts = _triton.load(row_scale_ref.at[row]), []
    for part in (column, column + gate_up_ref.shape[1] // 2):
        scale = _triton.load(scale_ref.at[part], mask=mask, other=0)
        scaled = _read_plain(gate_up_ref, row, part, mask) * row_scale * scale
        # Rounded as it would be in memory: the same bits as of rows that were multiplied before.
        parts.append(scaled.astype(gate_up_ref.dtype).astype(jnp.float32))
    return _gate(*parts)


def _gate(gate: Array, up: Array) -> Array:
    return gate * _triton.reciprocal(1 + _triton.exp2(gate * -LOG2_E)) * up
