"""Speeds of products with quantised weights, and of the tiles among which the kernels choose.

    python -m benchmarks.quantized_matmul [--kind int4 ...] [--seconds 150]
    python -m benchmarks.quantized_matmul --compare             # forms that may replace the present
    python -m benchmarks.quantized_matmul --sweep [mosaic]      # which tiles are fastest

Weights rotate over more than a gigabyte, so that the L2 cache is cold, and launch time counts. All
results are checked against the plain computation of some outputs in the same run. What fails is
told and left out. Activations are rounded once per program, not once per product.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.quantized_problems import (
    AS_CALLED,
    COMPARED_KINDS,
    KINDS,
    Forms,
    Matmul,
    Problem,
    called,
    check,
    compared_forms,
    make_problem,
    mosaic_forms,
    rows_of,
    triton_forms,
)
from swiftjax.bench.records import ROOT, Figure, Run, machine_name, make_record, write_records

SHAPES = ((4096, 28672), (14336, 4096), (4096, 6144), (4096, 4096))
TOKENS = (1, 8, 16, 64, 256, 2048)
COMPARED_TOKENS, SWEPT_TOKENS = (16, 64, 256, 512, 1024, 2048, 8192), (16, 64)
SWEPT_MOSAIC_TOKENS = (16, 64, 256, 2048)
MATMULS_PER_CALL, ROUNDS, ROUND_S = 8, 5, 0.02


def compiled_call(problem: Problem, matmul: Matmul, tokens: int) -> Any:
    """Several products with different weights in one program."""
    count = min(MATMULS_PER_CALL, len(problem.weights))
    matmul = jax.jit(matmul)  # traced and lowered once for all of them

    def call(x: jax.Array, *weights: tuple[jax.Array, ...]) -> list[jax.Array]:
        return [matmul(x, *parts) for parts in weights]

    return jax.jit(call).lower(rows_of(problem, tokens), *problem.weights[:count]).compile()


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
            **({} if name == AS_CALLED else {"implementation": name}),
        },
    )  # fmt: skip


def compile_all(problem: Problem, forms: dict[int, Forms]) -> dict[tuple[int, str], Any]:
    """Programs by number of tokens and form, or why there is none: before any is timed."""

    def compiled(item: tuple[int, str]) -> Any:
        tokens, name = item
        try:
            return compiled_call(problem, forms[tokens][name], tokens)
        except Exception as error:  # what does not compile is a result too
            return f"{type(error).__name__}: {str(error)[:120]}"

    items = [(tokens, name) for tokens, named in forms.items() for name in named]
    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(items, pool.map(compiled, items), strict=True))


def measure(problem: Problem, tokens: int, calls: dict[str, Any], until: float) -> Iterator[Figure]:
    """Time the forms of a product; the fastest first."""
    results = []
    for name, call in calls.items():
        if time.monotonic() > until:
            print(f"{problem.kind:5} ran out of time before: {name}, {tokens} tokens", flush=True)
            continue
        try:
            if isinstance(call, str):
                raise RuntimeError(call)
            results.append((microseconds(problem, call, tokens), name))
        except Exception as error:
            print(f"{problem.kind:5} failed: {name}: {str(error)[:160]}", flush=True)
    for us, name in sorted(results):
        yield report(problem, tokens, name, us)


def forms_of(problem: Problem, tokens: int, args: argparse.Namespace) -> Forms:
    """What is asked for."""
    if args.compare:
        return compared_forms(problem, tokens)
    if args.sweep == "mosaic":
        return mosaic_forms(problem, tokens)
    if args.sweep:
        return triton_forms(problem, tokens)
    return {AS_CALLED: called(problem.kind)}


def parsed() -> argparse.Namespace:
    """The command line, with what depends on the mode filled in."""
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--sweep", nargs="?", const="triton", choices=("triton", "mosaic"))
    mode.add_argument("--compare", action="store_true")
    parser.add_argument("--kind", nargs="*")
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--shapes", nargs="*", type=lambda s: tuple(map(int, s.split("x"))))
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit")
    args = parser.parse_args()
    is_mosaic = args.sweep == "mosaic"
    kinds = ("int4",) if is_mosaic else KINDS if args.sweep else ("bf16", *KINDS)
    swept = SWEPT_MOSAIC_TOKENS if is_mosaic else SWEPT_TOKENS
    args.kind = args.kind or (COMPARED_KINDS if args.compare else kinds)
    args.tokens = args.tokens or (
        COMPARED_TOKENS if args.compare else swept if args.sweep else TOKENS
    )
    args.shapes = args.shapes or (SHAPES[:2] if args.compare or args.sweep else SHAPES)
    return args


def main() -> None:
    """Print the table and write records; with --sweep only print."""
    args = parsed()
    name = "candidates.json" if args.compare else "quant.json"
    path = args.out / machine_name() / name
    command = "python -m benchmarks.quantized_matmul" + (" --compare" if args.compare else "")
    problems = [*itertools.product(args.shapes, args.kind)]
    start = time.monotonic()
    for i, ((inputs, outputs), kind) in enumerate(problems):
        # A fair share for each, but of what is compared the first is worth most.
        until = start + args.seconds * (1 if args.compare else (i + 1) / len(problems))
        if time.monotonic() > until:
            print(f"{kind:5} ran out of time before: [{inputs},{outputs}]", flush=True)
            continue
        problem = make_problem(kind, inputs, outputs)
        forms = {tokens: forms_of(problem, tokens, args) for tokens in args.tokens}
        calls = compile_all(problem, forms)
        for tokens in args.tokens:
            mine = {name: calls[tokens, name] for name in forms[tokens]}
            figures = [*measure(problem, tokens, mine, until)]
            run = Run(model="llama3-8b", dtype=kind, command=command, commit=args.commit)
            if not args.sweep:
                write_records(path, [make_record(figure, run) for figure in figures])


if __name__ == "__main__":
    main()
