"""Puts a runner together: programs, fresh state and weights, for a KV cache of given sizes.

Programs are made from shapes alone, so they can be had before any weight is read. Called by
`swiftjax/build.py`, which does these steps one by one, and by whoever needs no engine.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from swiftjax import kernels
from swiftjax.config import KVCacheDtype
from swiftjax.errors import InvalidRequestError
from swiftjax.memory import MemoryPlan
from swiftjax.model.kept_programs import KeptPrograms
from swiftjax.model.kv_cache import make_kv_cache
from swiftjax.model.penalties import empty_counts
from swiftjax.model.programs import Programs, State
from swiftjax.model.runner import ModelRunner
from swiftjax.model.step_model import StepModel
from swiftjax.model_config import ModelConfig


def make_programs(
    config: ModelConfig,
    *,
    max_num_seqs: int,
    num_pages: int,
    page_size: int,
    max_model_len: int,
    implementation: kernels.Implementation,
    kv_cache_dtype: KVCacheDtype = "auto",
    row_invariant: bool = False,
    kept: KeptPrograms | None = None,
) -> Programs:
    """The programs of a model and a cache of these sizes, for rows < max_num_seqs."""
    model = StepModel(
        config,
        max_model_len=max_model_len,
        implementation=implementation,
        row_invariant=row_invariant,
    )
    state = jax.eval_shape(
        lambda: make_state(
            config,
            max_num_seqs=max_num_seqs,
            num_pages=num_pages,
            page_size=page_size,
            kv_cache_dtype=kv_cache_dtype,
        )
    )
    return Programs(model, state, kept)


def make_state(
    config: ModelConfig,
    *,
    max_num_seqs: int,
    num_pages: int,
    page_size: int,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> State:
    """A fresh KV cache, in the model's dtype unless asked otherwise, and no tokens."""
    cache = make_kv_cache(
        config, num_pages=num_pages, page_size=page_size,
        dtype=jnp.dtype(config.dtype or "float32"), kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    last_tokens = jnp.zeros(max_num_seqs, jnp.int32)
    return State(cache, last_tokens, empty_counts(max_num_seqs, config.vocab_size))


def allocate(make: Callable[[], State], plan: MemoryPlan) -> State:
    """Make the state, now; raises InvalidRequestError, with the plan, where it does not fit.

    Somebody else may have taken memory of the device since it was planned.
    """
    try:
        return jax.block_until_ready(make())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InvalidRequestError(
            f"out of device memory: a KV cache of {plan.num_pages} pages was planned and does not "
            f"fit any more.\n{plan.table()}\nEnd what else uses the device, or lower "
            "gpu_memory_utilization"
        ) from error


def make_runner(
    config: ModelConfig,
    params: dict[str, Array],
    *,
    max_num_seqs: int,
    num_pages: int,
    page_size: int,
    max_model_len: int,
    implementation: kernels.Implementation,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> ModelRunner:
    """A runner with programs and state of its own, for whoever needs no more than that."""
    programs = make_programs(
        config,
        max_num_seqs=max_num_seqs,
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        implementation=implementation,
        kv_cache_dtype=kv_cache_dtype,
    )
    state = partial(
        make_state, config, max_num_seqs=max_num_seqs, num_pages=num_pages, page_size=page_size,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    runner = ModelRunner(programs, programs.model.bind(params), state)
    runner.allocate()
    return runner
