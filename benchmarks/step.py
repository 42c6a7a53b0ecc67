"""Time of one decode step of a model with random weights, through the runner the engine uses.

    python -m benchmarks.step --shape llama3-8b --batch 1 8 64 256 --context 576

Steps are dispatched back to back on one prepared batch and timed as a whole, so the host's time
counts only where it is longer than the device's. Medians of several rounds go to
benchmarks/results/<machine>/step.json.
"""

import argparse
import datetime
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.records import commit, write_records
from swiftjax import kernels
from swiftjax.batch import Batch, BatchShape, empty_batch
from swiftjax.config import ModelConfig, RopeConfig
from swiftjax.model.llama import random_params
from swiftjax.model.runner import ModelRunner, make_runner

RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "llama3-8b": ModelConfig(
        family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_position=131072,
        rope=RopeConfig(theta=5e5), dtype="bfloat16",
    ),
    "smollm2-135m": ModelConfig(
        family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30,
        num_heads=9, num_kv_heads=3, head_dim=64, max_position=8192, tie_word_embeddings=True,
        rope=RopeConfig(theta=1e5), dtype="float32",
    ),
}  # fmt: skip
STEPS, ROUNDS = 20, 5


def decode_batch(shape: BatchShape, context: int, page_size: int, num_pages: int) -> Batch:
    """Every sequence has `context` tokens, the newest of them new, on pages of its own."""
    batch = empty_batch(shape, num_pages * page_size)
    rows = np.arange(shape.num_seqs, dtype=np.int32)
    pages = -(-context // page_size)
    table = rows[:, None] * pages + np.arange(pages, dtype=np.int32)[None]
    # Neighbouring pages of a long-running engine are not neighbours in memory.
    shuffled = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    batch.page_table[:, :pages] = shuffled[table % num_pages]
    batch.token_ids[:] = rows % 1000
    batch.positions[:] = context - 1
    batch.context_lens[:] = context
    batch.query_starts[:] = np.arange(shape.num_seqs + 1)
    batch.sample_rows[:] = rows
    last = batch.page_table[:, pages - 1]
    batch.slot_mapping[:] = last * page_size + (context - 1) % page_size
    return batch


def time_step(runner: ModelRunner, batch: Batch) -> list[float]:
    """Milliseconds a step, one figure per round."""
    runner.dispatch(batch).wait(1)
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            pending = runner.dispatch(batch)
        pending.wait(1)
        rounds.append((time.perf_counter() - start) / STEPS * 1e3)
    return rounds


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Build the runner once, then time every batch size."""
    config, page_size = SHAPES[args.shape], args.page_size
    params = random_params(config, jnp.dtype(config.dtype or "float32"))
    weights = sum(x.nbytes for x in params.values())
    max_pages = -(-max(args.context) // page_size)
    num_pages = max(b * -(-c // page_size) for b in args.batch for c in args.context) + 1
    runner = make_runner(
        config, params, max_num_seqs=max(args.batch), num_pages=num_pages, page_size=page_size,
        max_model_len=max(args.context), implementation=args.implementation,
    )  # fmt: skip
    records = []
    for context in args.context:
        for size in args.batch:
            shape = BatchShape(num_tokens=size, num_seqs=size, max_pages=max_pages)
            start = time.perf_counter()
            runner.warm_up([shape])
            compiled = time.perf_counter() - start
            rounds = time_step(runner, decode_batch(shape, context, page_size, num_pages))
            records.append({
                "workload": "decode step", "model": args.shape, "dtype": config.dtype,
                "batch": size, "context": context, "unit": "ms/step",
                "value": round(statistics.median(rounds), 3),
                "spread": [round(min(rounds), 3), round(max(rounds), 3)],
                "implementation": args.implementation, "page_size": page_size,
                "weights_gb": round(weights / 1e9, 2), "compile_s": round(compiled, 1),
                "gpu": jax.devices()[0].device_kind, "jax": jax.__version__,
                "commit": args.commit or commit(),
                "command": f"python -m benchmarks.step --shape {args.shape} --batch {size} "
                f"--context {context} --implementation {args.implementation}",
                "date": datetime.date.today().isoformat(),
            })  # fmt: skip
            print(f"B={size} ctx={context}: {records[-1]['value']} ms "
                  f"{records[-1]['spread']}, compile {compiled:.1f} s", flush=True)  # fmt: skip
    del runner, params
    gc.collect()
    return records


def main() -> None:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description="Time of one decode step, random weights")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[576])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--implementation", choices=kernels.IMPLEMENTATIONS, default="triton")
    parser.add_argument("--machine", default="h200", help="folder of the results")
    parser.add_argument("--commit", help="commit to record where git is not there")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder above the machine's")
    args = parser.parse_args()
    write_records(args.out / args.machine / "step.json", measure(args))


if __name__ == "__main__":
    main()
