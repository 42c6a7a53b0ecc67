"""The one place where the planes meet: `build_core` makes a finished engine core from a path.

It knows the order: device memory fraction, weights, memory budget, runner, scheduler. Everything it
calls is finished when its constructor returns. Called by `api.py` and the CLI.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from swiftjax import kernels
from swiftjax.config import EngineConfig, ModelConfig, SchedulerConfig
from swiftjax.converters.demo_model import default_cache_dir, resolve_model
from swiftjax.converters.dummy import load_dummy
from swiftjax.converters.load import load_checkpoint
from swiftjax.engine.batching import Buckets, make_buckets, make_single_bucket
from swiftjax.engine.core import EngineCore, EngineLimits
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.policies import victim_policy_for
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import Request
from swiftjax.engine.rows import RowTable
from swiftjax.engine.scheduler import Scheduler
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.engine.tracer import Tracer, check_writable
from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.memory import GIB, MemoryPlan, plan_pages, temporaries
from swiftjax.model.kv_cache import bytes_per_page
from swiftjax.model.logprobs import PROMPT_BLOCK
from swiftjax.model.programs import SAMPLERS
from swiftjax.model.runner import ModelRunner, make_runner

logger = logging.getLogger(__name__)

# Without a GPU the cache competes with everything else on the machine.
CPU_CACHE_BYTES = GIB
# What graphs, cuBLAS and the driver take outside the pool that JAX manages.
GPU_MARGIN_BYTES = GIB // 2


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
            self.core.scheduler.costs = PreemptionCosts(
                host_pages=host_pages, seconds_per_page=per_page, seconds_per_token=per_token
            )

    @property
    def is_on_gpu(self) -> bool:
        """Whether steps run on a GPU."""
        return _is_on_gpu()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """The numbers that `None` in an EngineConfig leaves to the device and the model."""

    max_model_len: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    min_decode: int

    @property
    def max_pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)


def build_core(
    config: EngineConfig, progress: Callable[[int, int], None] | None = None
) -> BuiltCore:
    """Load a model and assemble its engine; `progress` gets (bytes read, bytes in all).

    Raises CheckpointError, UnsupportedError or InvalidRequestError before any request is taken.
    """
    path = None if config.load_format == "dummy" else resolve_model(config.model_path)
    asked = _asked_implementation(config.implementation)
    if config.trace:
        check_writable(config.trace)
    _configure_jax(config.gpu_memory_utilization)
    if path is None:
        loaded = load_dummy(config.model_path, dtype=config.dtype)
    else:
        loaded = load_checkpoint(path, dtype=config.dtype, progress=progress)
    model = loaded.config
    sizes = _choose_sizes(config, model)
    implementation = _choose_implementation(asked, model, sizes.page_size)
    plan = _plan_memory(config, model, loaded.params, sizes)
    runner = make_runner(
        model,
        loaded.params,
        max_num_seqs=sizes.max_num_seqs,
        num_pages=plan.num_pages,
        page_size=sizes.page_size,
        max_model_len=sizes.max_model_len,
        implementation=implementation,
        samplers=("full",) if config.deterministic else SAMPLERS,
    )
    buckets = _make_buckets(sizes, deterministic=config.deterministic)
    tokenizer = Tokenizer(loaded.tokenizer_files, chat_template=config.chat_template)
    limits = EngineLimits(model.vocab_size, sizes.max_model_len, model.eos_token_ids)
    pool = PagePool(plan.num_pages, sizes.page_size)
    scheduler = _make_scheduler(config, sizes, pool, model, str(path and path.resolve()))
    salt = _prefix_salt(model)
    tracer = Tracer(config.trace, scheduler, salt=salt) if config.trace else None
    # A CPU computes with the cores that the host would plan on, so it has nothing to gain.
    overlaps = _is_on_gpu() if config.overlap is None else config.overlap
    core = EngineCore(scheduler, runner, buckets, limits, observer=tracer, overlaps=overlaps)
    logger.info("%s kernels; memory:\n%s", implementation, plan.table())
    swap_bytes = int(config.swap_space_gib * GIB)
    return BuiltCore(core, tokenizer, model, runner, buckets, plan, swap_bytes)


def _asked_implementation(name: str | None) -> kernels.Implementation | None:
    """Refuse an unknown name before the weights are read, which may take minutes."""
    if name is None:
        return None
    for known in kernels.IMPLEMENTATIONS:
        if known == name:
            return known
    raise InvalidRequestError(
        f"implementation {name!r} is unknown; choose one of {', '.join(kernels.IMPLEMENTATIONS)}"
    )


def _choose_implementation(
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
    config: EngineConfig, sizes: _Sizes, pool: PagePool, model: ModelConfig, model_version: str
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
    )
    rows = RowTable(sizes.max_num_seqs, sizes.max_pages_per_seq)
    return Scheduler(scheduling, pool, rows, salt=_prefix_salt(model), model_version=model_version)


def _prefix_salt(model: ModelConfig) -> Callable[[Request], str]:
    """Dynamic RoPE turns the keys of a long prompt by angles that depend on its whole length."""
    is_dynamic = model.rope.kind == "dynamic"

    def salt(request: Request) -> str:
        length = len(request.prompt_token_ids)
        is_scaled = is_dynamic and length > model.rope.original_max_position
        return f"{request.options.cache_salt}/{length if is_scaled else ''}"

    return salt


def _configure_jax(memory_fraction: float) -> None:
    """Must run before the first use of a device; a cache directory the user chose is kept."""
    # Only GPU clients read this option.
    jax.config.update("jax_pjrt_client_create_options", {"memory_fraction": memory_fraction})
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _choose_sizes(config: EngineConfig, model: ModelConfig) -> _Sizes:
    on_gpu = _is_on_gpu()
    # Dynamic scaling exists to go beyond the trained length, every other kind states its own.
    growth = model.rope.factor if model.rope.kind == "dynamic" else 1.0
    longest = int(model.max_position * growth)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise InvalidRequestError(
            f"max_model_len is {config.max_model_len}; the model is made for {longest} tokens: "
            "lower it to that or leave it out"
        )
    return _Sizes(
        max_model_len=config.max_model_len or longest,
        page_size=config.page_size or (64 if on_gpu else 16),
        max_num_seqs=config.max_batch_size or (64 if on_gpu else 8),
        max_num_batched_tokens=config.max_num_batched_tokens or (2048 if on_gpu else 512),
        # On a GPU a matrix product of 8 rows is no slower than one of a single row.
        min_decode=8 if on_gpu else 1,
    )


def _make_buckets(sizes: _Sizes, *, deterministic: bool) -> Buckets:
    if deterministic:
        return make_single_bucket(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_pages=sizes.max_pages_per_seq,
        )
    return make_buckets(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_pages=sizes.max_pages_per_seq,
        min_decode=sizes.min_decode,
        fine=_is_on_gpu(),
    )


def _plan_memory(
    config: EngineConfig, model: ModelConfig, params: dict[str, Array], sizes: _Sizes
) -> MemoryPlan:
    itemsize = jnp.dtype(model.dtype or "float32").itemsize
    page_bytes = bytes_per_page(model, sizes.page_size, itemsize)
    weights = sum(array.nbytes for array in params.values())
    temporary = temporaries(
        model,
        num_tokens=max(sizes.max_num_batched_tokens, sizes.max_num_seqs + 1),
        num_rows=max(sizes.max_num_seqs, PROMPT_BLOCK),
        itemsize=itemsize,
    )
    stats = jax.local_devices()[0].memory_stats()
    asked = config.max_total_token_num
    asked_pages = None if asked is None else -(-asked // sizes.page_size)
    if stats:
        # What else this process holds, such as another engine, is not ours to give away.
        others = max(0, stats["bytes_in_use"] - weights)
        budget = stats["bytes_limit"] - GPU_MARGIN_BYTES - others
    else:
        wanted = max(CPU_CACHE_BYTES, (asked_pages or 0) * page_bytes)
        # A CPU client would promise more than there is, and the system then kills the process.
        budget = min(weights + temporary + wanted, _host_memory_bytes())
    return plan_pages(
        budget=budget,
        weights=weights,
        temporaries=temporary,
        page_bytes=page_bytes,
        page_size=sizes.page_size,
        max_pages=sizes.max_num_seqs * sizes.max_pages_per_seq,
        asked_pages=asked_pages,
    )


def _is_on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
