"""Times products of many tokens by `kernels/dense_matmul.py` beside XLA's, what follows included.

    python -m benchmarks.dense_matmul [--kind bf16 fp8] [--tokens 256 512 ...] [--sweep]

Weights of the four shapes of an 8B layer, which rotate; forms take turns, several rounds each, so
that all of them meet a card that is as warm. What follows is what the model does there: silu(gate)
* up of gates, a residual for the two that end in one, and scales of 8-bit operands. With --sweep
all tiles are timed, not only the chosen ones. Every form is checked against float64 in some rows.
Records go to benchmarks/results/<machine>/products.json, a record for each form.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from swiftjax.bench.records import ROOT, Figure, Run, machine_name, make_record, write_records
from swiftjax.kernels.dense_matmul import dense_matmul, is_dense_faster
from swiftjax.kernels.dense_work import ROUND_US, DenseTile, choose_dense_tile
from swiftjax.kernels.quantized_reference import CONTRACT_LAST, apply_scales
from swiftjax.kernels.rounded_rows import Gated, plain_rows
from swiftjax.model.compiler_options import LIBRARY_PRODUCTS

# name -> inputs, outputs, what follows
SHAPES = {
    "qkv": (4096, 6144, "nothing"),
    "output": (4096, 4096, "residual"),
    "gate_up": (4096, 28672, "gated"),
    "down": (14336, 4096, "residual"),
}
DTYPES = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}
TOKENS = (256, 512, 768, 1024, 1536, 2048, 4096, 8192)
NUM_WEIGHTS, ROUNDS, ROUND_S = 4, 5, 0.03
TOLERANCE = 2e-2  # XLA rounds before what follows


class Problem(NamedTuple):
    """Operands of one product; `weights` are several, of which each call takes all in turn."""

    x: jax.Array
    weights: list[jax.Array]
    residual: jax.Array
    scales: tuple[jax.Array, jax.Array] | None
    following: str


Form = Callable[[Problem, jax.Array], jax.Array]


def by_xla(problem: Problem, kernel: jax.Array) -> jax.Array:
    """The product as XLA computes it."""
    if problem.scales is None:
        y = problem.x @ kernel
    else:
        y = lax.dot_general(problem.x, kernel, CONTRACT_LAST, preferred_element_type=jnp.bfloat16)
        y = apply_scales(y, *problem.scales, jnp.bfloat16)
    if problem.following == "gated":
        return plain_rows(Gated(y))
    return problem.residual + y if problem.following == "residual" else y


def by_kernel(tile: DenseTile, problem: Problem, kernel: jax.Array) -> jax.Array:
    """The product as Mosaic's kernel computes it."""
    return dense_matmul(
        problem.x,
        kernel,
        residual=problem.residual if problem.following == "residual" else None,
        scales=problem.scales,
        outputs_first=problem.scales is not None,
        gated=problem.following == "gated",
        tile=tile,
    )


def make_problem(kind: str, name: str, tokens: int) -> Problem:
    """Random operands."""
    (inputs, outputs, following), dtype = SHAPES[name], DTYPES[kind]
    keys = iter(jax.random.split(jax.random.key(tokens), NUM_WEIGHTS + 2))
    x = jax.random.normal(next(keys), (tokens, inputs), jnp.bfloat16).astype(dtype)
    residual = jax.random.normal(next(keys), (tokens, outputs), jnp.bfloat16)
    weights = [jax.random.normal(key, (inputs, outputs), jnp.bfloat16) for key in keys]
    if kind == "bf16":
        return Problem(x, [w * inputs**-0.5 for w in weights], residual, None, following)
    scales = jnp.ones(tokens), jnp.full(outputs, inputs**-0.5)
    return Problem(x, [w.T.astype(dtype) for w in weights], residual, scales, following)


def forms_of(kind: str, problem: Problem, *, sweep: bool) -> dict[str, Form]:
    """XLA's, and that of the chosen tile or of all."""
    tokens, inputs = problem.x.shape
    outputs = problem.residual.shape[1]
    tiles = [DenseTile(warpgroups=w, columns=columns) for w, columns in ROUND_US]
    if not sweep:
        row_bytes, gated = inputs * problem.x.dtype.itemsize, problem.following == "gated"
        chosen = choose_dense_tile(tokens, row_bytes, outputs, gated=gated)
        tiles = [chosen] if chosen else []
    fitting = [tile for tile in tiles if tile.fits(tokens, outputs)]
    ours = {f"{t.rows}x{t.columns}": partial(by_kernel, t) for t in fitting}
    return {f"xla {kind}": by_xla, **ours}


def compiled(problem: Problem, form: Form) -> Any:
    """A program of one product after another, with different weights."""

    def run(*arrays: Any) -> list[jax.Array]:
        given = Problem(*arrays, problem.following)
        return [form(given, kernel) for kernel in given.weights]

    return jax.jit(run).lower(*problem[:4]).compile(dict(LIBRARY_PRODUCTS))


def check(problem: Problem, got: jax.Array) -> None:
    """Raise AssertionError unless some rows are right."""
    rows = np.array([0, 1, 63, 64, 130, len(problem.x) // 2 + 5, len(problem.x) - 1])
    exact = np.asarray(problem.x[rows].astype(jnp.float32), np.float64)
    kernel = np.asarray(problem.weights[0].astype(jnp.float32), np.float64)
    if problem.scales is not None:
        exact = exact @ kernel.T * np.asarray(problem.scales[1], np.float64)
    else:
        exact = exact @ kernel
    if problem.following == "gated":
        gate, up = np.split(exact, 2, axis=1)
        exact = gate / (1 + np.exp(-gate)) * up
    if problem.following == "residual":
        exact += np.asarray(problem.residual[rows].astype(jnp.float32), np.float64)
    found = np.asarray(got[rows].astype(jnp.float32), np.float64)
    error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert error.max() <= TOLERANCE, f"relative error {error.max():.1e} is above {TOLERANCE}"


def time_forms(problem: Problem, programs: dict[str, Any]) -> dict[str, list[float]]:
    """Microseconds of a product, sorted, by form; the forms take turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        check(problem, program(*problem[:4])[0])
    for _ in range(ROUNDS):
        for name, program in programs.items():
            times[name].append(_seconds(program, problem) * 1e6 / NUM_WEIGHTS)
    return {name: sorted(found) for name, found in times.items()}


def _seconds(program: Any, problem: Problem) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*problem[:4]))
    calls = max(2, int(ROUND_S / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(calls):
        result = program(*problem[:4])
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def measure(kind: str, tokens: list[int], *, sweep: bool) -> Iterator[Figure]:
    """All shapes of a kind; one line for each number of tokens."""
    for name, (inputs, outputs, following) in SHAPES.items():
        problems = {count: make_problem(kind, name, count) for count in tokens}
        forms = [
            (count, label, problem, form)
            for count, problem in problems.items()
            for label, form in forms_of(kind, problem, sweep=sweep).items()
        ]
        with ThreadPoolExecutor(max_workers=8) as pool:
            made = pool.map(lambda item: compiled(*item[2:]), forms)
            programs = list(zip(forms, made, strict=True))
        for count, problem in problems.items():
            mine = {label: program for (n, label, *_), program in programs if n == count}
            times = time_forms(problem, mine)
            ours = is_dense_faster(
                count, inputs, outputs, problem.x.dtype, gated=following == "gated"
            )
            report(kind, name, count, times, chosen="kernel" if ours else "xla")
            for label, found in times.items():
                rate = 2 * count * inputs * outputs / statistics.median(found) / 1e6
                yield Figure(
                    workload=f"product_{name}_{kind}", batch=count, context=inputs,
                    value=statistics.median(found), unit="us", spread=(found[0], found[-1]),
                    details={"outputs": outputs, "tflops": round(rate), "implementation": label},
                )  # fmt: skip


def report(
    kind: str, name: str, tokens: int, times: dict[str, list[float]], *, chosen: str
) -> None:
    """One line: medians, and what the engine takes."""
    medians = "  ".join(f"{label} {statistics.median(found):.1f}" for label, found in times.items())
    print(f"{kind:5} {name:8} {tokens:5} tokens: {medians} us; chosen: {chosen}", flush=True)


def main() -> None:
    """Measure, and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--sweep", action="store_true", help="all tiles, not the chosen ones")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit")
    args = parser.parse_args()
    path = args.out / machine_name() / "products.json"
    for kind in args.kind:
        run = Run(
            model="llama3-8b", dtype=kind, command="python -m benchmarks.dense_matmul",
            commit=args.commit,
        )  # fmt: skip
        figures = measure(kind, args.tokens, sweep=args.sweep)
        write_records(path, [make_record(figure, run) for figure in figures])


if __name__ == "__main__":
    main()
