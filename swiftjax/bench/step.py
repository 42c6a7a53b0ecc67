"""Time of one bare decode step, through the runner that the engine uses, with random weights.

Steps are dispatched back to back on one prepared batch and timed as a whole, so the host's time
counts only where it is longer than the device's.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from swiftjax import kernels
from swiftjax.batch import Batch, BatchShape, empty_batch
from swiftjax.bench.limits import Peaks, decode_ms
from swiftjax.bench.records import Figure
from swiftjax.config import KVCacheDtype
from swiftjax.model.assembly import make_runner
from swiftjax.model.params import random_params
from swiftjax.model.runner import ModelRunner
from swiftjax.model_config import ModelConfig

STEPS, ROUNDS = 20, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """Batch sizes and context lengths, every one with every other."""

    batches: Sequence[int]
    contexts: Sequence[int]
    page_size: int
    implementation: kernels.Implementation
    kv_cache_dtype: KVCacheDtype = "auto"


def measure_steps(config: ModelConfig, case: StepCase, peaks: Peaks | None) -> Iterator[Figure]:
    """Median milliseconds a step; details: seconds to compile, milliseconds to dispatch."""
    params = random_params(config, jnp.dtype(config.dtype or "float32"))
    max_pages = -(-max(case.contexts) // case.page_size)
    num_pages = max(b * -(-c // case.page_size) for b in case.batches for c in case.contexts) + 1
    runner = make_runner(
        config, params, max_num_seqs=max(case.batches), num_pages=num_pages,
        page_size=case.page_size, max_model_len=max(case.contexts),
        implementation=case.implementation, kv_cache_dtype=case.kv_cache_dtype,
    )  # fmt: skip
    for context in case.contexts:
        for size in case.batches:
            shape = BatchShape(num_tokens=size, num_seqs=size, max_pages=max_pages)
            compiled = runner.warm_up([shape])
            batch = decode_batch(shape, context, case.page_size, num_pages)
            rounds = time_step(runner, batch)
            yield Figure(
                workload="decode step", batch=size, context=context, unit="ms/step",
                value=statistics.median(rounds), spread=(min(rounds), max(rounds)),
                limit=peaks and decode_ms(config, size, context, peaks),
                details={"page_size": case.page_size, "compile_s": round(compiled, 1)},
            )  # fmt: skip


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
