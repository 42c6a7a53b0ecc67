"""Speeds of products with quantised weights, and of the tiles among which the kernels choose.

    python -m benchmarks.quantized_matmul [--sweep] [--kind int4 ...] [--seconds 150]

Weights rotate over more than a gigabyte, so that the L2 cache is cold, and launch time counts. All
results are checked against the plain computation of some outputs in the same run. A tile that
fails is told and left out. Activations are rounded once per program, not once per product.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from swiftjax import kernels
from swiftjax.bench.records import ROOT, Figure, Run, machine_name, make_record, write_records
from swiftjax.kernels import _triton
from swiftjax.kernels import quantized_reference as reference
from swiftjax.kernels.int4_matmul import int4_tiles
from swiftjax.kernels.narrow_matmul import narrow_matmul
from swiftjax.kernels.split_k import MatmulTile, choose_tile
from swiftjax.model.linear import packed_params
from swiftjax.quantization import WeightFormat

KINDS = ("int4", "int8", "fp8", "w8a8")
SHAPES = ((4096, 28672), (14336, 4096), (4096, 6144), (4096, 4096))
TOKENS = (1, 8, 16, 64, 256, 2048)
ROTATED_BYTES, MATMULS_PER_CALL, ROUNDS, ROUND_S = 1.2e9, 8, 5, 0.02
TOLERANCE, CHECKED_OUTPUTS = 2e-2, 256

Matmul = Callable[..., jax.Array]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Weights of one kind and shape, several times over."""

    kind: str
    inputs: int
    outputs: int
    weights: list[tuple[jax.Array, ...]]

    @property
    def packed_bytes(self) -> int:
        """Of the codes of one matrix, without scales."""
        return self.weights[0][0].nbytes


def make_problem(kind: str, inputs: int, outputs: int) -> Problem:
    """Random codes; a scale that gives results of about one."""
    if kind == "bf16":
        likes: list[Any] = [jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16)]
    else:
        form = WeightFormat(kind=kind, group_size=128 if kind == "int4" else 0)  # type: ignore[arg-type]
        likes = list(packed_params(form, inputs, outputs).values())
    size = likes[0].size * likes[0].dtype.itemsize
    weights = []
    for i in range(-(-int(ROTATED_BYTES) // size)):
        keys = jax.random.split(jax.random.key(i), len(likes))
        weights.append(tuple(map(random_like, keys, likes)))
    return Problem(kind=kind, inputs=inputs, outputs=outputs, weights=weights)


@partial(jax.jit, static_argnums=1)
def random_like(key: jax.Array, like: Any) -> jax.Array:
    """Any codes of one parameter."""
    if like.dtype == jnp.int32:
        return jax.random.bits(key, like.shape, jnp.uint32).view(jnp.int32)
    if like.dtype == jnp.int8:
        return jax.random.randint(key, like.shape, -127, 128, jnp.int8)
    if like.dtype == jnp.uint8:
        return jax.random.randint(key, like.shape, 0, 16, jnp.uint8)
    if like.dtype == jnp.float32:
        return jax.random.uniform(key, like.shape, jnp.float32, 0.01, 0.02)
    return jax.random.normal(key, like.shape, jnp.bfloat16).astype(like.dtype)


def product_of(kind: str, tile: MatmulTile | None, implementation: Any = "triton") -> Matmul:
    """The op that the model calls, or its kernel with a tile given."""
    if kind == "bf16":
        return jnp.dot
    if tile is None:
        op = getattr(kernels, f"{kind}_matmul")
        options = {"group_size": 128} if kind == "int4" else {}
        return partial(op, implementation=implementation, **options)
    if kind == "int4":
        return partial(int4_tiles, group_size=128, tile=tile)

    def narrow(x: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
        if kind == "int8":
            return narrow_matmul(x, kernel, scale, None, dtype=x.dtype, tile=tile)
        limit = reference.INT8_MAX if kind == "w8a8" else reference.FP8_MAX
        values, rows = reference.quantize_rows(x, limit)
        values = jnp.round(values) if kind == "w8a8" else values
        return narrow_matmul(
            values.astype(kernel.dtype), kernel, scale, rows[:, 0], dtype=x.dtype, tile=tile
        )

    return narrow


def compiled_call(problem: Problem, matmul: Matmul, tokens: int) -> Any:
    """Several products with different weights in one program."""
    count = min(MATMULS_PER_CALL, len(problem.weights))

    def call(x: jax.Array, *weights: tuple[jax.Array, ...]) -> list[jax.Array]:
        return [matmul(x, *parts) for parts in weights]

    return jax.jit(call).lower(rows_of(problem, tokens), *problem.weights[:count]).compile()


def rows_of(problem: Problem, tokens: int) -> jax.Array:
    """The activations, the same each time."""
    return jax.random.normal(jax.random.key(7), (tokens, problem.inputs), jnp.bfloat16)


class Spread(NamedTuple):
    """Microseconds of one product over the rounds."""

    median: float
    best: float
    worst: float


def microseconds(problem: Problem, call: Any, tokens: int) -> Spread:
    """Time one product; raises AssertionError for a wrong one."""
    x, count = rows_of(problem, tokens), min(MATMULS_PER_CALL, len(problem.weights))
    check(problem, x, call(x, *problem.weights[:count])[0])
    sets = [
        [problem.weights[(first + i) % len(problem.weights)] for i in range(count)]
        for first in range(0, len(problem.weights), count)
    ]

    def run(times: int) -> float:
        start = time.perf_counter()
        for i in range(times):
            out = call(x, *sets[i % len(sets)])
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / times / count

    repeats = max(2 * len(sets), int(ROUND_S / (run(len(sets)) * count)))
    rounds = [1e6 * run(repeats) for _ in range(ROUNDS)]
    return Spread(statistics.median(rounds), min(rounds), max(rounds))


def check(problem: Problem, x: jax.Array, out: jax.Array) -> None:
    """Compare some outputs with the plain computation."""
    if problem.kind == "bf16":
        return
    kernel, *scales = problem.weights[0]
    plain = getattr(reference, f"{problem.kind}_matmul")
    options = {"group_size": 128} if problem.kind == "int4" else {}
    some = slice(0, CHECKED_OUTPUTS)
    wanted = plain(x, kernel[some], *(scale[..., some] for scale in scales), **options)
    got, wanted = (part.astype(jnp.float32) for part in (out[:, some], wanted))
    error = float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))
    assert error < TOLERANCE, f"relative error {error:.1e}"


def tiles_to_try(kind: str, problem: Problem, tokens: int) -> Iterator[MatmulTile]:
    """The chosen tile first, then others around it."""
    chosen = choose_tile(
        tokens, problem.outputs, problem.inputs, transposed=kind in ("fp8", "w8a8")
    )
    yield chosen
    if kind == "int4":
        # Twice the outputs read the activations half as often.
        wide = _triton.Launch(num_warps=8, num_stages=3)
        yield replace(chosen, transposed=True, fused=True)
        yield replace(chosen, transposed=True, fused=True, block_n=256, launch=wide)
        yield replace(chosen, transposed=True, fused=True, block_n=256, launch=wide, splits=2)
    # Operands of 8 bits have their own instructions only where the weights stand first.
    orders = (True,) if kind in ("fp8", "w8a8") else (False, True)
    block_ks = (128,) if kind == "int4" else (128, 256)
    splits = (2, 4, 8) if problem.outputs < problem.inputs else (1, 2)
    for order, block_n, block_k, parts, (warps, stages) in itertools.product(
        orders, (64, 128), block_ks, splits, ((4, 3), (4, 4), (8, 3))
    ):
        yield replace(
            chosen, block_n=block_n, block_k=block_k, transposed=order, splits=parts,
            launch=_triton.Launch(num_warps=warps, num_stages=stages),
        )  # fmt: skip


def told(tile: MatmulTile | None) -> str:
    """A tile in a few words."""
    if tile is None:
        return "as the model calls it"
    sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}, {tile.splits} splits"
    order = "transposed" if tile.transposed else "straight"
    fused = ", fused" if tile.fused else ""
    launch = f"{tile.launch.num_warps} warps, {tile.launch.num_stages} stages"
    return f"{sizes}, {order}, {launch}{fused}"


def report(problem: Problem, tokens: int, name: str, us: Spread) -> Figure:
    """One line, and what a record says."""
    rate = problem.packed_bytes / us.median / 1e3
    flops = 2 * tokens * problem.inputs * problem.outputs / us.median / 1e6
    shape = f"[{tokens},{problem.inputs}]x[{problem.inputs},{problem.outputs}]"
    print(
        f"{problem.kind:5} {shape:26} {us.median:8.1f} us {rate:6.0f} GB/s {flops:6.0f} TFLOP/s  "
        f"{name}",
        flush=True,
    )
    return Figure(
        workload=f"matmul_{problem.kind}", batch=tokens, context=problem.inputs, value=us.median,
        unit="us", spread=(us.best, us.worst),
        details={
            "outputs": problem.outputs, "packed_gb_per_s": round(rate), "tflops": round(flops),
        },
    )  # fmt: skip


def measure(
    problem: Problem, tokens: int, tiles: list[Any], until: float, best: int
) -> list[Figure]:
    """Time tiles and tell the `best`; None is the model's own call, 'xla' the portable one."""

    def compiled(tile: Any) -> Any:
        try:
            is_xla = tile == "xla"
            matmul = product_of(
                problem.kind, None if is_xla else tile, "xla" if is_xla else "triton"
            )
            return compiled_call(problem, matmul, tokens)
        except Exception as error:  # a tile that does not compile is a result too
            return f"{type(error).__name__}: {str(error)[:120]}"

    results = []
    with ThreadPoolExecutor(max_workers=8) as pool:
        for tile, call in zip(tiles, pool.map(compiled, tiles), strict=True):
            name = tile if tile == "xla" else told(tile)
            if time.monotonic() > until:
                pool.shutdown(wait=False, cancel_futures=True)
                print(f"{problem.kind:5} ran out of time before: {name}", flush=True)
                break
            if isinstance(call, str):
                print(f"{problem.kind:5} failed: {name}: {call}", flush=True)
                continue
            try:
                results.append((microseconds(problem, call, tokens), name))
            except Exception as error:
                print(f"{problem.kind:5} failed: {name}: {str(error)[:120]}", flush=True)
    return [report(problem, tokens, name, us) for us, name in sorted(results)[:best]]


def main() -> None:
    """Print the table and write records; with --sweep only print the best tiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--kind", nargs="*", default=["bf16", *KINDS])
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--shapes", nargs="*", type=lambda s: tuple(map(int, s.split("x"))))
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit")
    args = parser.parse_args()
    path = args.out / machine_name() / "quant.json"
    command = "python -m benchmarks.quantized_matmul"
    kinds = [kind for kind in args.kind if kind != "bf16" or not args.sweep]
    start = time.monotonic()
    for i, kind in enumerate(kinds):
        until = start + args.seconds * (i + 1) / len(kinds)
        for inputs, outputs in args.shapes or (SHAPES[:2] if args.sweep else SHAPES):
            problem = make_problem(kind, inputs, outputs)
            for tokens in args.tokens or ((16, 64) if args.sweep else TOKENS):
                if args.sweep:
                    measure(problem, tokens, [*tiles_to_try(kind, problem, tokens)], until, 4)
                    continue
                figures = measure(problem, tokens, [None], until, 1)
                run = Run(model="llama3-8b", dtype=kind, command=command, commit=args.commit)
                write_records(path, [make_record(figure, run) for figure in figures])


if __name__ == "__main__":
    main()
