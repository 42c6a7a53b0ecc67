"""Tiles of ragged attention that may replace the chosen one: what they need, and how fast they are.

    python -m benchmarks.attention_tiles                    # on a GPU: times them, checks each
    python -m benchmarks.deviceless PACKAGES -m benchmarks.attention_tiles --needs    # without one

A tile that fails is told and left out. Records go to results/<gpu>/candidates.json.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_targets import TARGETS
from swiftjax.bench.records import ROOT, Figure, Run, machine_name, make_record, write_records
from swiftjax.kernels import _triton, measure
from swiftjax.kernels.ragged_attention import RaggedConfig, block_attention

# rows, keys a trip, warps, stages
SIZES = ((128, 64, 4, 2), (128, 64, 8, 2), (128, 32, 4, 3), (256, 64, 8, 2), (64, 64, 4, 3))
WORKLOADS = ("prefill", "prefill_chunk", "mixed")
REGISTERS = 65536  # of a multiprocessor


def candidates() -> list[RaggedConfig]:
    """Every size; the chosen one first."""
    return [
        RaggedConfig(
            rows=rows, block_k=keys,
            launch=_triton.Launch(num_warps=warps, num_stages=stages),
        )
        for rows, keys, warps, stages in SIZES
    ]  # fmt: skip


def attend_with(config: RaggedConfig) -> Callable[..., jax.Array]:
    """Ragged attention with these tiles."""
    return partial(block_attention, scale=measure.SCALE, window=0, streams=None, config=config)


def told(config: RaggedConfig) -> str:
    """A tile in a few words."""
    launch = f"{config.launch.num_warps} warps, {config.launch.num_stages} stages"
    return f"{config.rows} x {config.block_k}, {launch}"


def measured() -> Iterator[Figure]:
    """Time every tile on this GPU, the chosen one first."""
    ceilings = measure.measure_ceilings()
    shape = (5120, measure.NUM_KV_HEADS, measure.PAGE_SIZE, measure.HEAD_DIM)
    pools = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2)]
    for name, config in itertools.product(WORKLOADS, candidates()):
        try:
            timed = measure.measure_ragged(
                pools, name, measure.RAGGED[name], ceilings, attend_with(config)
            )
        except Exception as error:  # a tile that does not compile is a result too
            print(f"{name:14} {told(config):34} {str(error)[:90]}", flush=True)
            continue
        figures = f"{timed.microseconds:8.1f} us {timed.value:6.0f} TFLOP/s"
        print(f"{name:14} {told(config):34} {figures} error {timed.error:.1e}", flush=True)
        yield Figure(
            workload=name, batch=timed.batch, context=timed.context, value=timed.value,
            unit=timed.unit, spread=timed.spread, limit=timed.limit,
            details={"implementation": told(config), "error": float(f"{timed.error:.2g}")},
        )  # fmt: skip


def print_needs() -> None:
    """Registers, spills and shared memory on an H200, and how many programs fit side by side."""
    from benchmarks.deviceless import compile_for

    target = TARGETS["h200"]
    for config in candidates():
        kernel = compile_for(target, attend_with(config), *prompt_specs()).kernels[-1]
        fit = min(
            target.shared_per_core // max(kernel.shared, 1),
            REGISTERS // (kernel.registers * kernel.threads),
        )
        print(
            f"{told(config):34} {kernel.registers:3} registers, {kernel.spilled:4} bytes spilled, "
            f"{kernel.shared:6} bytes shared, {fit} programs a multiprocessor", flush=True,
        )  # fmt: skip


def prompt_specs() -> tuple[Any, ...]:
    """The shapes of a prompt of 8,192 tokens."""
    spec = jax.ShapeDtypeStruct
    q = spec((8192, measure.NUM_HEADS, measure.HEAD_DIM), jnp.bfloat16)
    shape = (1000, measure.NUM_KV_HEADS, measure.PAGE_SIZE, measure.HEAD_DIM)
    pages = spec(shape, jnp.bfloat16)
    return (q, pages, pages, *(spec(s, jnp.int32) for s in ((1, 128), (2,), (1,))))


def main() -> None:
    """Print and write what is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--needs", action="store_true", help="compile only, for an H200")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.needs:
        print_needs()
        return
    run = Run(
        model="llama3-8b heads", dtype="bfloat16", command="python -m benchmarks.attention_tiles"
    )
    records = [make_record(figure, run) for figure in measured()]
    write_records(arguments.out / machine_name() / "candidates.json", records)


if __name__ == "__main__":
    main()
