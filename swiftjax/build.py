"""The one place where the planes meet: `build_core` makes a finished engine core from a path.

It knows the order: device memory fraction, memory budget, programs, weights, runner, scheduler.
Everything it calls is finished when its constructor returns. Called by `api.py` and the CLI.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from swiftjax import kernels
from swiftjax.config import EngineConfig, ModelConfig, SchedulerConfig, SessionLimits
from swiftjax.converters.load import load_params
from swiftjax.engine.batching import Buckets, make_buckets, make_single_bucket
from swiftjax.engine.core import EngineCore, EngineLimits
from swiftjax.engine.kept_pages import KeptLimits
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.policies import victim_policy_for
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import Request
from swiftjax.engine.rows import RowTable
from swiftjax.engine.scheduler import Scheduler
from swiftjax.engine.streaming import MAX_STREAM_LEN, Streaming
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.engine.tracer import Tracer, check_writable
from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.memory import GIB, MemoryPlan
from swiftjax.model.page_copies import PageCopies
from swiftjax.model.runner import ModelRunner, make_programs, make_state
from swiftjax.sizing import (
    Sizes,
    check_kv_cache_dtype,
    choose_sizes,
    configure_jax,
    is_on_gpu,
    open_model,
    plan_memory,
)

logger = logging.getLogger(__name__)


class BuiltCore(NamedTuple):
    """A finished engine core and what stands around it."""

    core: EngineCore
    tokenizer: Tokenizer
    model_config: ModelConfig
    runner: ModelRunner
    buckets: Buckets
    memory: MemoryPlan
    swap_bytes: int

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile every step shape; afterwards no request waits for the compiler.

        Also does what `measure_swap` does.
        """
        seconds = self.runner.warm_up(self.buckets.all, progress)
        self.measure_swap()
        return seconds

    def measure_swap(self) -> None:
        """Measure what moving a page and computing a token cost, where the host has room for pages.

        Until then preempted sequences are computed again. Compiles the largest step if need be, and
        the two programs that move pages; call it while nothing is computed.
        """
        host_pages = self.swap_bytes // self.memory.page_bytes
        if host_pages:
            per_page, per_token = self.runner.measure(self.buckets.mixed[-1])
            self.core.scheduler.preemption.costs = PreemptionCosts(
                host_pages=host_pages, seconds_per_page=per_page, seconds_per_token=per_token
            )

    @property
    def is_on_gpu(self) -> bool:
        """Whether steps run on a GPU."""
        return is_on_gpu()


def build_core(
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
) -> BuiltCore:
    """Load a model and assemble its engine; `progress` gets (bytes read, bytes in all).

    Raises CheckpointError, UnsupportedError or InvalidRequestError before any request is taken.
    """
    asked = read_implementation(config.implementation)
    if config.trace:
        check_writable(config.trace)
    configure_jax(config.gpu_memory_utilization)
    check_kv_cache_dtype(config.kv_cache_dtype)
    opened = open_model(config)
    model = opened.config
    default_streaming = _default_streaming(config)
    if config.streaming:
        check_streaming(model)
    sizes = choose_sizes(config, model)
    implementation = choose_kernels(asked, model, sizes.page_size)
    plan = plan_memory(config, model, sizes)
    buckets = _make_buckets(sizes, config)
    programs = make_programs(
        model,
        max_num_seqs=sizes.max_num_seqs,
        num_pages=plan.num_pages,
        page_size=sizes.page_size,
        max_model_len=MAX_STREAM_LEN if config.streaming else sizes.max_model_len,
        implementation=implementation,
        kv_cache_dtype=config.kv_cache_dtype,
        row_invariant=config.deterministic,
    )
    params = programs.model.bind(load_params(opened, progress))
    state = make_state(
        model,
        max_num_seqs=sizes.max_num_seqs,
        num_pages=plan.num_pages,
        page_size=sizes.page_size,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    runner = ModelRunner(programs, params, state)
    runner.copies = _make_copies(config)
    tokenizer = Tokenizer(opened.tokenizer_files, chat_template=config.chat_template)
    limits = EngineLimits(
        model.vocab_size,
        sizes.max_model_len,
        model.eos_token_ids,
        config.streaming,
        has_sessions=config.trace is None,
        windows=tuple(sorted({window for window in model.layer_windows if window})),
        default_streaming=default_streaming,
    )
    limits.check_windows(default_streaming)
    pool = PagePool(plan.num_pages, sizes.page_size)
    kept = _limit_kept(config.sessions, plan)
    scheduler = _make_scheduler(config, sizes, pool, model, buckets, kept)
    salt = _prefix_salt(model)
    tracer = Tracer(config.trace, scheduler, salt=salt) if config.trace else None
    # A CPU computes with the cores that the host would plan on, so it has nothing to gain.
    overlaps = is_on_gpu() if config.overlap is None else config.overlap
    core = EngineCore(scheduler, runner, buckets, limits, observer=tracer, overlaps=overlaps)
    logger.info("%s kernels; memory:\n%s", implementation, plan.table())
    swap_bytes = int(config.swap_space_gib * GIB)
    return BuiltCore(core, tokenizer, model, runner, buckets, plan, swap_bytes)


def _default_streaming(config: EngineConfig) -> Streaming | None:
    if config.streaming_window is None:
        return None
    return Streaming(sink=config.streaming_sink, window=config.streaming_window)


def check_streaming(model: ModelConfig) -> None:
    """Refuse models whose rotation does not go together with sinks and a window."""
    if model.rope.kind == "dynamic":
        raise UnsupportedError(
            "streaming does not know RoPE of the dynamic kind, whose angles depend on how long the "
            "text is: leave streaming out"
        )


def read_implementation(name: str | None) -> kernels.Implementation | None:
    """Refuse an unknown name before the weights are read, which may take minutes."""
    if name is None:
        return None
    for known in kernels.IMPLEMENTATIONS:
        if known == name:
            return known
    raise InvalidRequestError(
        f"implementation {name!r} is unknown; choose one of {', '.join(kernels.IMPLEMENTATIONS)}"
    )


def choose_kernels(
    asked: kernels.Implementation | None, model: ModelConfig, page_size: int
) -> kernels.Implementation:
    """The one asked for, or the platform's own; what that one lacks is computed by "xla"."""
    chosen = asked or kernels.choose_implementation(jax.default_backend())
    try:
        kernels.check_supported(
            chosen,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            page_size=page_size,
            dtype=model.dtype or "float32",
        )
    except NotImplementedError as error:
        if asked is not None:
            raise UnsupportedError(str(error)) from error
        logger.warning("%s", error)
        return "xla"
    return chosen


def _make_scheduler(
    config: EngineConfig,
    sizes: Sizes,
    pool: PagePool,
    model: ModelConfig,
    buckets: Buckets,
    kept: KeptLimits,
) -> Scheduler:
    scheduling = SchedulerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_queue_len=config.max_queue_len,
        policy=config.policy,
        victim_policy=config.victim_policy or victim_policy_for(config.policy),
        prefix_cache=config.prefix_cache,
        min_batch_size=config.min_batch_size,
        max_wait=config.max_wait_ms / 1000,
        step_sizes=tuple(shape.num_tokens for shape in buckets.mixed),
    )
    rows, salt = RowTable(sizes.max_num_seqs, sizes.max_pages_per_seq), _prefix_salt(model)
    version = os.path.abspath(config.model_path)
    return Scheduler(scheduling, pool, rows, salt=salt, model_version=version, kept=kept)


def _limit_kept(limits: SessionLimits, plan: MemoryPlan) -> KeptLimits:
    stored = limits.host_gib + (limits.disk_gib if limits.folder else 0.0)
    return KeptLimits(
        device_pages=int(plan.num_pages * limits.device_share),
        stored_pages=int(stored * GIB) // plan.page_bytes,
    )


def _make_copies(config: EngineConfig) -> PageCopies:
    """Room for the preempted and for idle sessions; what is on disk is the oldest of both."""
    limits = config.sessions
    host_bytes = (config.swap_space_gib + limits.host_gib) * GIB
    return PageCopies(host_bytes, Path(limits.folder) if limits.folder else None)


def _prefix_salt(model: ModelConfig) -> Callable[[Request], str]:
    """Dynamic RoPE turns the keys of a long prompt by angles that depend on its whole length."""
    is_dynamic = model.rope.kind == "dynamic"

    def salt(request: Request) -> str:
        length = len(request.prompt_token_ids)
        is_scaled = is_dynamic and length > model.rope.original_max_position
        return f"{request.options.cache_salt}/{length if is_scaled else ''}"

    return salt


def _make_buckets(sizes: Sizes, config: EngineConfig) -> Buckets:
    if config.deterministic:
        return make_single_bucket(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_pages=sizes.max_pages_per_seq,
            streams=config.streaming,
        )
    return make_buckets(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_pages=sizes.max_pages_per_seq,
        min_decode=sizes.min_decode,
        fine=is_on_gpu(),
        streams=config.streaming,
    )
