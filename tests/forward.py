"""Run prompts through the real step code and return all logits, not only the sampled rows."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from swiftjax import kernels
from swiftjax.batch import Batch
from swiftjax.config import SchedulerConfig
from swiftjax.engine.batching import make_batch
from swiftjax.engine.buckets import make_buckets
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.request import GenerationConfig, Request
from swiftjax.engine.rows import RowTable
from swiftjax.engine.scheduler import Plan, Scheduler
from swiftjax.engine.streaming import MAX_STREAM_LEN, Streaming
from swiftjax.model.kv_cache import KVCache, make_kv_cache
from swiftjax.model.step_model import StepModel
from swiftjax.model_config import ModelConfig


def forward_logits(
    config: ModelConfig,
    params: dict[str, Array],
    token_ids: SequenceOf[int],
    *,
    chunks: SequenceOf[int] | None = None,
    page_size: int = 16,
    implementation: kernels.Implementation = "xla",
    streaming: Streaming | None = None,
    far: int = 0,
) -> np.ndarray:
    """Logits [T V] of a paged forward pass, cut into `chunks` tokens a step (None: one step).

    With chunks of 1 every step after the first is a decode. The prompt length is the first chunk's
    only if the rest are decodes; otherwise the whole text is the prompt. With `streaming` there are
    no more pages than sinks, window and chunks take, and tokens behind the sinks stand at positions
    that are larger by `far`.
    """
    chunks = chunks or [len(token_ids)]
    assert sum(chunks) == len(token_ids)
    num_pages = -(-len(token_ids) // page_size)
    if streaming is not None:
        num_pages = streaming.most_pages(page_size)
    config = config if config.dtype else dataclasses.replace(config, dtype="float32")
    length = MAX_STREAM_LEN if streaming else max(config.max_position, len(token_ids))
    model = StepModel(config, max_model_len=length, implementation=implementation)
    weights = model.bind(params)
    step = _step(model, config, implementation)
    cache = make_kv_cache(
        config, num_pages=num_pages, page_size=page_size, dtype=next(iter(params.values())).dtype
    )
    logits = []
    for batch, count in _batches(token_ids, chunks, num_pages, page_size, streaming):
        if streaming is not None:
            batch.positions[batch.positions >= streaming.sink] += far
        out, cache = step(weights, cache, batch)
        logits.append(np.asarray(out[:count]))
    return np.concatenate(logits)


_steps: dict[tuple[ModelConfig, str], Callable[..., tuple[Array, KVCache]]] = {}


def _step(
    model: StepModel, config: ModelConfig, implementation: kernels.Implementation
) -> Callable[..., tuple[Array, KVCache]]:
    """One jitted function per config, so that equal shapes compile once; weights are arguments."""

    def step(params: tuple[Array, ...], cache: KVCache, batch: Batch) -> tuple[Array, KVCache]:
        llama, hidden, cache = model.forward(params, cache, batch)
        return llama.logits(hidden, implementation).astype(jnp.float32), cache

    return _steps.setdefault((config, implementation), jax.jit(step))


def _batches(
    token_ids: SequenceOf[int],
    chunks: SequenceOf[int],
    num_pages: int,
    page_size: int,
    streaming: Streaming | None,
) -> list[tuple[Batch, int]]:
    """Plans of the real scheduler for one sequence, with the budget set to each chunk in turn."""
    request = Request(
        request_id="forward",
        prompt_token_ids=tuple(token_ids),
        generation=GenerationConfig(streaming=streaming),
        max_new_tokens=1,
        stop_token_ids=frozenset(),
        seed=0,
        arrival_time=0.0,
    )
    rows = RowTable(2, num_pages)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=2), PagePool(num_pages, page_size), rows)
    scheduler.submit(request)
    buckets = make_buckets(
        max_num_seqs=2,
        max_num_batched_tokens=max(64, *chunks),
        max_pages=num_pages,
        streams=streaming is not None,
    )
    batches = []
    for count in chunks:
        scheduler.config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=count)
        plan = scheduler.schedule(0.0)
        scheduler.check_integrity()
        assert isinstance(plan, Plan) and sum(w.num_new for w in plan.work) == count
        num_slots = num_pages * page_size
        batches.append(
            (make_batch(plan, rows, buckets, page_size=page_size, num_slots=num_slots), count)
        )
    return batches
