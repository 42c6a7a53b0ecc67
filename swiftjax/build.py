"""The one place where the planes meet: `build_core` makes a finished engine core from a path.

It knows the order: device memory fraction, memory budget, programs, weights, runner, scheduler.
Everything it calls is finished when its constructor returns. Called by `api.py` and the CLI.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from swiftjax import kernels
from swiftjax.build_scheduler import choose_buckets, make_scheduler, prefix_salt
from swiftjax.config import EngineConfig
from swiftjax.converters.load import OpenCheckpoint, load_params
from swiftjax.engine.buckets import Buckets
from swiftjax.engine.core import EngineCore
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.page_limits import check_fits
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.streaming import MAX_STREAM_LEN, Streaming
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.engine.tracer import Tracer, check_writable
from swiftjax.errors import UnsupportedError
from swiftjax.kernel_choice import check_prompt_attention, read_implementation
from swiftjax.memory import GIB, MemoryPlan
from swiftjax.model.assembly import allocate, make_programs, make_state
from swiftjax.model.kernel_support import choose_kernels
from swiftjax.model.page_copies import PageCopies
from swiftjax.model.row_invariance import knows_invariant_rows
from swiftjax.model.runner import ModelRunner
from swiftjax.model_config import ModelConfig
from swiftjax.sizing import (
    Sizes,
    check_kv_cache_dtype,
    choose_sizes,
    configure_jax,
    is_on_gpu,
    kept_programs,
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
        """Compile every step shape, then allocate; afterwards no request waits for the compiler.

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
    *,
    warms_up: bool | None = False,
) -> BuiltCore:
    """Load a model and assemble its engine; `progress` gets (bytes read, bytes in all).

    `warms_up` says that `warm_up` follows (None: on a GPU): it takes the memory of the KV cache
    after compiling, otherwise that is taken here. Raises CheckpointError, UnsupportedError or
    InvalidRequestError before any request is taken.
    """
    asked = read_implementation(config.implementation)
    if config.trace:
        check_writable(config.trace)
    configure_jax(config.gpu_memory_utilization)
    check_kv_cache_dtype(config.kv_cache_dtype)
    opened = open_model(config)
    model = opened.config
    if config.streaming:
        check_streaming(model)
    sizes = choose_sizes(config, model)
    limits = _limits(config, model, sizes)
    implementation = choose_kernels(asked, model, sizes.page_size)
    check_prompt_attention(config, model, implementation)
    memory = plan_memory(config, model, sizes)
    if config.deterministic and knows_invariant_rows(model, implementation):
        implementation = "invariant"
    buckets = choose_buckets(sizes, config, is_invariant=implementation == "invariant")
    runner = _load_runner(config, opened, sizes, memory, implementation, progress)
    if not (is_on_gpu() if warms_up is None else warms_up):
        runner.allocate()
    tokenizer = Tokenizer(opened.tokenizer_files, chat_template=config.chat_template)
    scheduler = make_scheduler(config, sizes, memory, model, buckets)
    tracer = Tracer(config.trace, scheduler, salt=prefix_salt(model)) if config.trace else None
    # A CPU computes with the cores that the host would plan on, so it has nothing to gain.
    overlaps = is_on_gpu() if config.overlap is None else config.overlap
    core = EngineCore(scheduler, runner, buckets, limits, observer=tracer, overlaps=overlaps)
    logger.info("%s kernels; memory:\n%s", implementation, memory.table())
    swap_bytes = int(config.swap_space_gib * GIB)
    return BuiltCore(core, tokenizer, model, runner, buckets, memory, swap_bytes)


def _limits(config: EngineConfig, model: ModelConfig, sizes: Sizes) -> EngineLimits:
    default = None
    if config.streaming_window is not None:
        default = Streaming(sink=config.streaming_sink, window=config.streaming_window)
    limits = EngineLimits(
        model.vocab_size,
        sizes.max_model_len,
        model.eos_token_ids,
        config.streaming,
        has_sessions=config.trace is None,
        windows=tuple(sorted({window for window in model.layer_windows if window})),
        default_streaming=default,
    )
    limits.check_windows(default)
    if default is not None:
        check_fits(default, sizes.page_size, sizes.max_pages_per_seq)
    return limits


def _load_runner(
    config: EngineConfig,
    opened: OpenCheckpoint,
    sizes: Sizes,
    memory: MemoryPlan,
    implementation: kernels.Implementation,
    progress: Callable[[int, int], None] | None,
) -> ModelRunner:
    programs = make_programs(
        opened.config,
        max_num_seqs=sizes.max_num_seqs,
        num_pages=memory.num_pages,
        page_size=sizes.page_size,
        max_model_len=MAX_STREAM_LEN if config.streaming else sizes.max_model_len,
        implementation=implementation,
        kv_cache_dtype=config.kv_cache_dtype,
        row_invariant=config.deterministic,
        kept=kept_programs(),
    )
    params = programs.model.bind(load_params(opened, progress))
    make = partial(
        make_state,
        opened.config,
        max_num_seqs=sizes.max_num_seqs,
        num_pages=memory.num_pages,
        page_size=sizes.page_size,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    runner = ModelRunner(programs, params, partial(allocate, make, memory))
    runner.copies = _make_copies(config)
    return runner


def check_streaming(model: ModelConfig) -> None:
    """Refuse models whose rotation does not go together with sinks and a window."""
    if model.rope.kind == "dynamic":
        raise UnsupportedError(
            "streaming does not know RoPE of the dynamic kind, whose angles depend on how long the "
            "text is: leave streaming out"
        )


def _make_copies(config: EngineConfig) -> PageCopies:
    """Room for the preempted and for idle sessions; what is on disk is the oldest of both."""
    limits = config.sessions
    host_bytes = (config.swap_space_gib + limits.host_gib) * GIB
    return PageCopies(host_bytes, Path(limits.folder) if limits.folder else None)
