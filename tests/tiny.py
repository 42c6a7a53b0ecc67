"""A tiny random LLaMA and engines over it."""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from swiftjax.config import SchedulerConfig
from swiftjax.engine.buckets import make_buckets
from swiftjax.engine.core import EngineCore
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.rows import RowTable
from swiftjax.engine.scheduler import Scheduler
from swiftjax.engine.streaming import MAX_STREAM_LEN
from swiftjax.model.assembly import make_runner
from swiftjax.model.params import random_params
from swiftjax.model.runner import ModelRunner
from swiftjax.model_config import ModelConfig

TINY = ModelConfig(
    family="llama",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=512,
    dtype="float32",
)


@functools.cache
def tiny_params(config: ModelConfig = TINY) -> dict[str, Array]:
    """Random weights, the same in every test."""
    return random_params(config, jnp.dtype(config.dtype or "float32"))


@functools.cache
def warm_runner(
    num_pages: int, page_size: int, max_model_len: int, max_num_seqs: int
) -> ModelRunner:
    """One runner per size for all cores; no core trusts what an earlier one left in pages."""
    return tiny_runner(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )


def tiny_runner(
    *,
    num_pages: int,
    page_size: int,
    config: ModelConfig = TINY,
    max_model_len: int = 512,
    max_num_seqs: int = 5,
) -> ModelRunner:
    """A runner with a fresh cache over the tiny weights."""
    return make_runner(
        config,
        tiny_params(TINY),
        max_num_seqs=max_num_seqs,
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        implementation="xla",
    )


@functools.cache
def shared_core(page_size: int = 16) -> EngineCore:
    """One core per page size for all tests: an idle core keeps nothing of what it ran before."""
    return tiny_core(page_size=page_size, num_pages=1024 // page_size)


def tiny_core(
    *,
    num_pages: int = 64,
    page_size: int = 16,
    max_model_len: int = 512,
    max_num_seqs: int = 5,
    max_num_batched_tokens: int = 64,
    prefix_cache: bool = True,
    costs: PreemptionCosts | None = None,
    overlaps: bool = False,
    runner: ModelRunner | None = None,
    streams: bool = False,
) -> EngineCore:
    """A real engine core over the tiny model, or over a runner of these sizes."""
    max_pages = -(-max_model_len // page_size)
    buckets = make_buckets(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_pages=max_pages,
        streams=streams,
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_cache=prefix_cache,
    )
    pool, rows = PagePool(num_pages, page_size), RowTable(max_num_seqs, max_pages)
    return EngineCore(
        Scheduler(config, pool, rows, costs=costs),
        runner
        or warm_runner(
            num_pages, page_size, MAX_STREAM_LEN if streams else max_model_len, max_num_seqs
        ),
        buckets,
        EngineLimits(TINY.vocab_size, max_model_len, (), streams),
        overlaps=overlaps,
    )
