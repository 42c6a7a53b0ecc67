"""Forms of a decode layer that launch fewer kernels: how many, and how fast they are.

    python -m benchmarks.decode_layers                      # on a GPU: times them
    python -m benchmarks.deviceless PACKAGES -m benchmarks.decode_layers --count      # without one

XLA splits the sum of a product with few rows, adds the parts and the residual in a kernel of its
own, and normalises in another. Here the split is written out, and one kernel does all three; the
rotation adds up the parts of its own product. Shapes are those of Llama-3-8B.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from benchmarks.gpu_targets import TARGETS
from swiftjax import kernels
from swiftjax.bench.records import ROOT, Figure, Run, machine_name, make_record, write_records
from swiftjax.kernels import _triton
from swiftjax.kernels.paged_tile import Ref, pl_range
from swiftjax.kernels.rope_write import rotate_rows

EPS, PAGE_SIZE, CONTEXT = 1e-5, 64, 576
BATCHES = (8, 64, 256)
ROUNDS, STEPS = 7, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Sizes of a layer."""

    model: int = 4096
    mlp: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head: int = 128


class Form(NamedTuple):
    """Parts into which the products for attention, residual and residual are split; 0: by XLA."""

    qkv: int
    output: int
    down: int


FORMS = {
    "as it is": Form(0, 0, 0),
    "norms add": Form(0, 4, 8),
    "norms and rotation add": Form(4, 4, 8),
}


class Weights(NamedTuple):
    """One layer."""

    qkv: Any
    output: Any
    gate_up: Any
    down: Any
    attention_norm: Any
    mlp_norm: Any


class Rows(NamedTuple):
    """What a step reads besides weights and pages."""

    slots: Any
    table: Any
    lens: Any
    cos: Any
    sin: Any


def split_product(x: Array, weight: Array, parts: int) -> Array:
    """x @ weight, or its parts [S T N] in float32."""
    if not parts:
        return x @ weight
    x = x.reshape(x.shape[0], parts, -1)
    weight = weight.reshape(parts, -1, weight.shape[1])
    return jnp.einsum("tsk,skn->stn", x, weight, preferred_element_type=jnp.float32)


def add_norm(
    parts: Float[Array, "S T D"], residual: Float[Array, "T D"], scale: Float[Array, " D"]
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Add up the parts and the residual; the sum, and its RMSNorm."""
    like = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    total, normed = _triton.launch(
        _add_norm_kernel, [parts, residual, scale], [like, like], name="add_norm",
        grid=(residual.shape[0],), knobs=_triton.Launch(num_warps=8, num_stages=1),
    )  # fmt: skip
    return total, normed


def _add_norm_kernel(
    parts_ref: Ref, residual_ref: Ref, scale_ref: Ref, total_ref: Ref, out_ref: Ref
) -> None:
    """Grid (T,): one row. Rounded where the model rounds: the product, the sum, the result."""
    row, (num_parts, _, width) = pl.program_id(0), parts_ref.shape
    column = pl_range(_triton.power_of_two(width))
    load = partial(_triton.load, mask=column < width, other=0)
    product = sum(load(parts_ref.at[i, row, column]) for i in range(num_parts))
    dtype = total_ref.dtype
    product = jnp.asarray(product).astype(dtype).astype(jnp.float32)
    total = (product + load(residual_ref.at[row, column]).astype(jnp.float32)).astype(dtype)
    _triton.store(total_ref.at[row, column], total, mask=column < width)
    wide = total.astype(jnp.float32)
    factor = lax.rsqrt((wide * wide).sum(axis=0) / width + EPS)
    out = wide * factor * load(scale_ref.at[column]).astype(jnp.float32)
    _triton.store(out_ref.at[row, column], out.astype(dtype), mask=column < width)


def added(y: Array, x: Array, scale: Array) -> tuple[Array, Array]:
    """The residual and its norm after a product, whole or in parts."""
    if y.ndim == 3:
        return add_norm(y, x, scale)
    return x + y, kernels.rms_norm(x + y, scale, EPS)


def run_layers(
    form: Form, x: Array, layers: list[Weights], pools: list[Any], rows: Rows, last_norm: Array
) -> tuple[Array, list[Any]]:
    """All layers and the last norm; the pages are written in place."""
    normed, written = kernels.rms_norm(x, layers[0].attention_norm, EPS), []
    for i, (w, (k, v)) in enumerate(zip(layers, pools, strict=True)):
        qkv = split_product(normed, w.qkv, form.qkv)
        q, k, v = rotate_rows(k, v, qkv, rows.cos, rows.sin, rows.slots, dtype=x.dtype)
        out = kernels.decode_attention(
            q, k, v, rows.table, rows.lens, scale=q.shape[-1] ** -0.5, implementation="triton"
        )
        y = split_product(out.reshape(len(x), -1), w.output, form.output)
        x, normed = added(y, x, w.mlp_norm)
        gate, up = jnp.split(normed @ w.gate_up, 2, axis=-1)
        y = split_product(jax.nn.silu(gate) * up, w.down, form.down)
        following = layers[i + 1].attention_norm if i + 1 < len(layers) else last_norm
        x, normed = added(y, x, following)
        written.append((k, v))
    return normed, written


def shapes(widths: Widths, num_layers: int, num_seqs: int, dtype: Any) -> tuple[Any, ...]:
    """The shapes of the arguments of `run_layers` after the form."""
    w, spec = widths, jax.ShapeDtypeStruct
    sizes = (
        (w.model, (w.heads + 2 * w.kv_heads) * w.head), (w.heads * w.head, w.model),
        (w.model, 2 * w.mlp), (w.mlp, w.model), (w.model,), (w.model,),
    )  # fmt: skip
    layers = [Weights(*(spec(s, dtype) for s in sizes)) for _ in range(num_layers)]
    columns = -(-CONTEXT // PAGE_SIZE)
    pages = spec((num_seqs * columns, w.kv_heads, PAGE_SIZE, w.head), dtype)
    slots, table = spec((num_seqs,), jnp.int32), spec((num_seqs, columns), jnp.int32)
    angles = spec((num_seqs, w.head // 2), jnp.float32)
    x = spec((num_seqs, w.model), dtype)
    rows = Rows(slots, table, slots, angles, angles)
    return x, layers, [(pages, pages)] * num_layers, rows, spec((w.model,), dtype)


def fill(widths: Widths, num_layers: int, num_seqs: int, dtype: Any) -> tuple[Any, ...]:
    """Random arrays of these shapes; every sequence has its own pages and is at its last slot."""
    leaves, tree = jax.tree.flatten(shapes(widths, num_layers, num_seqs, dtype))
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def one(key: Array, like: Any) -> Array:
        scale = like.shape[0] ** -0.5 if len(like.shape) == 2 else 1.0
        return (jax.random.normal(key, like.shape, jnp.float32) * scale).astype(like.dtype)

    make = jax.jit(one, static_argnums=1)
    arrays = [make(k, like) for k, like in zip(keys, leaves, strict=True)]
    x, layers, pools, rows, last = jax.tree.unflatten(tree, arrays)
    columns = rows.table.shape[1]
    table = jnp.arange(num_seqs * columns, dtype=jnp.int32).reshape(num_seqs, columns)
    slots = table[:, -1] * PAGE_SIZE + (CONTEXT - 1) % PAGE_SIZE
    lens = jnp.full((num_seqs,), CONTEXT, jnp.int32)
    return x, layers, pools, rows._replace(slots=slots, table=table, lens=lens), last


def print_counts() -> None:
    """Kernels of a layer on an H200: those between one attention and the next."""
    from benchmarks.deviceless import compile_for

    for num_seqs in BATCHES:
        for name, form in FORMS.items():
            specs = shapes(Widths(), 3, num_seqs, jnp.bfloat16)
            names = [
                kernel.name
                for kernel in compile_for(
                    TARGETS["h200"], partial(run_layers, form), *specs, donate=(2,)
                ).kernels
            ]
            at = [i for i, kernel in enumerate(names) if kernel == "decode_attention"]
            print(f"B={num_seqs:3} {name:22} {at[2] - at[1]:2} {names[at[1] : at[2]]}", flush=True)


def measured(num_layers: int) -> Iterator[Figure]:
    """Microseconds a layer, weights and pages of every layer its own.

    With how far the result is from that of the first form.
    """
    for num_seqs in BATCHES:
        x, layers, pools, rows, last = fill(Widths(), num_layers, num_seqs, jnp.bfloat16)
        first = None
        for name, form in FORMS.items():
            step = jax.jit(partial(run_layers, form), donate_argnums=2)
            out, pools = step(x, layers, pools, rows, last)
            first = out if first is None else first
            gap, size = (jnp.linalg.norm(v.astype(jnp.float32)) for v in (out - first, first))
            times = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                for _ in range(STEPS):
                    out, pools = step(x, layers, pools, rows, last)
                out.block_until_ready()
                times.append((time.perf_counter() - start) / STEPS / num_layers * 1e6)
            times.sort()
            figures = f"{times[ROUNDS // 2]:6.1f} us ({times[0]:.1f}-{times[-1]:.1f})"
            print(f"B={num_seqs:3} {name:22} {figures} off by {float(gap / size):.1e}", flush=True)
            yield Figure(
                workload="decode layer", batch=num_seqs, context=CONTEXT, unit="us/layer",
                value=times[ROUNDS // 2], spread=(times[0], times[-1]),
                details={"implementation": name},
            )  # fmt: skip


def main() -> None:
    """Print and write what is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="compile only, for an H200")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.count:
        print_counts()
        return
    run = Run(model="llama3-8b", dtype="bfloat16", command="python -m benchmarks.decode_layers")
    records = [make_record(figure, run) for figure in measured(arguments.layers)]
    write_records(arguments.out / machine_name() / "candidates.json", records)


if __name__ == "__main__":
    main()
