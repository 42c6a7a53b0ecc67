"""Makes the scheduler of an engine, and the shapes of its steps, from configuration and sizes.

The control plane's half of `build.py`, which calls it: nothing here touches a device.
"""

import os
from collections.abc import Callable

from swiftjax import kernels
from swiftjax.config import EngineConfig, SchedulerConfig, SessionLimits
from swiftjax.engine.buckets import (
    Buckets,
    make_buckets,
    make_invariant_buckets,
    make_single_bucket,
)
from swiftjax.engine.kept_pages import KeptLimits
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.policies import victim_policy_for
from swiftjax.engine.request import Request
from swiftjax.engine.rows import RowTable
from swiftjax.engine.scheduler import Scheduler
from swiftjax.memory import GIB, MemoryPlan
from swiftjax.model_config import ModelConfig
from swiftjax.sizing import Sizes, is_on_gpu


def make_scheduler(
    config: EngineConfig, sizes: Sizes, memory: MemoryPlan, model: ModelConfig, buckets: Buckets
) -> Scheduler:
    """A scheduler over as many pages as fit in memory."""
    pool = PagePool(memory.num_pages, sizes.page_size)
    kept = _limit_kept(config.sessions, memory)
    scheduling = SchedulerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_queue_len=config.max_queue_len,
        policy=config.policy,
        victim_policy=config.victim_policy or victim_policy_for(config.policy),
        prefix_cache=config.prefix_cache,
        min_batch_size=config.min_batch_size,
        max_wait=config.max_wait_ms / 1000,
        group_prompts=config.group_prompts,
        step_sizes=tuple(shape.num_tokens for shape in buckets.mixed),
    )
    rows, salt = RowTable(sizes.max_num_seqs, sizes.max_pages_per_seq), prefix_salt(model)
    version = os.path.abspath(config.model_path)
    return Scheduler(scheduling, pool, rows, salt=salt, model_version=version, kept=kept)


def _limit_kept(limits: SessionLimits, memory: MemoryPlan) -> KeptLimits:
    stored = limits.host_gib + (limits.disk_gib if limits.folder else 0.0)
    return KeptLimits(
        device_pages=int(memory.num_pages * limits.device_share),
        stored_pages=int(stored * GIB) // memory.page_bytes,
    )


def prefix_salt(model: ModelConfig) -> Callable[[Request], str]:
    """What cached keys and values depend on besides the tokens of a request.

    Dynamic RoPE turns the keys of a long prompt by angles that depend on its whole length.
    """
    is_dynamic = model.rope.kind == "dynamic"

    def salt(request: Request) -> str:
        length = len(request.prompt_token_ids)
        is_scaled = is_dynamic and length > model.rope.original_max_position
        return f"{request.options.cache_salt}/{length if is_scaled else ''}"

    return salt


def choose_buckets(sizes: Sizes, config: EngineConfig, *, is_invariant: bool = False) -> Buckets:
    """The shapes that steps are padded to: one if bits depend on it and may not, else several.

    `is_invariant` says that they depend on a row alone.
    """
    if is_invariant:
        return make_invariant_buckets(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_pages=sizes.max_pages_per_seq,
            filled_rows=kernels.FILLED_ROWS,
        )
    if config.deterministic:
        return make_single_bucket(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_pages=sizes.max_pages_per_seq,
            streams=config.streaming,
        )
    buckets = make_buckets(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_pages=sizes.max_pages_per_seq,
        fine=is_on_gpu(),
        streams=config.streaming,
    )
    return buckets if config.prompt_attention == "paged" else buckets.with_whole_prompt()
