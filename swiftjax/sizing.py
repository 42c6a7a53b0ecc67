"""How large things are: what `None` in an EngineConfig leaves to the device and the model.

Pages, rows and tokens of an engine, and the memory they take, before any weight is loaded. Called
by `build.py` and by `swiftjax plan`.
"""

import os
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swiftjax import kernels
from swiftjax.config import EngineConfig, KVCacheDtype
from swiftjax.converters.demo_model import default_cache_dir, resolve_model
from swiftjax.converters.dummy import open_dummy
from swiftjax.converters.load import OpenCheckpoint, open_checkpoint
from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.memory import GIB, MemoryPlan, plan_pages, temporaries
from swiftjax.model.kept_programs import KeptPrograms, open_kept
from swiftjax.model.kv_cache import bytes_per_page
from swiftjax.model.logprobs import PROMPT_BLOCK
from swiftjax.model.params import weight_bytes
from swiftjax.model_config import ModelConfig

# Without a GPU the cache competes with everything else on the machine.
CPU_CACHE_BYTES = GIB
# For products that the compiler tries out, and for what graphs, cuBLAS and the driver take outside
# the pool that JAX manages.
GPU_MARGIN_BYTES = GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The numbers that `None` in an EngineConfig leaves to the device and the model."""

    max_model_len: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def max_pages_per_seq(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)


class PlannedEngine(NamedTuple):
    """What an engine would be."""

    model: ModelConfig
    sizes: Sizes
    memory: MemoryPlan


def plan_engine(config: EngineConfig) -> PlannedEngine:
    """Size an engine without loading any weight; raises what `build_core` would."""
    configure_jax(config.gpu_memory_utilization)
    check_kv_cache_dtype(config.kv_cache_dtype)
    model = open_model(config).config
    sizes = choose_sizes(config, model)
    return PlannedEngine(model, sizes, plan_memory(config, model, sizes))


def open_model(config: EngineConfig) -> OpenCheckpoint:
    """Find and check the model of a configuration, without reading its weights."""
    dtype, quantization = config.dtype, config.quantization
    if config.load_format == "dummy":
        return open_dummy(config.model_path, dtype=dtype, quantization=quantization)
    path = resolve_model(config.model_path)
    return open_checkpoint(path, dtype=dtype, quantization=quantization)


def configure_jax(memory_fraction: float) -> None:
    """Set memory fraction and compile cache; must run before the first use of a device.

    A cache directory that the user chose is kept.
    """
    # Only GPU clients read this option.
    jax.config.update("jax_pjrt_client_create_options", {"memory_fraction": memory_fraction})
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", _own_cache())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def kept_programs() -> KeptPrograms | None:
    """The compiled programs of earlier starts.

    None where the user chose a device, where compiled code is kept, or that none is.
    """
    chosen = jax.config.values
    if chosen["jax_default_device"] or not chosen["jax_enable_compilation_cache"]:
        return None
    try:
        if chosen["jax_compilation_cache_dir"] != _own_cache():
            return None
        return open_kept(default_cache_dir() / "programs")
    except RuntimeError:  # this user has no home
        return None


def check_kv_cache_dtype(kv_cache_dtype: KVCacheDtype) -> None:
    """Raise UnsupportedError for a GPU that has no instructions for this type."""
    if kv_cache_dtype == "fp8" and not kernels.has_fp8():
        device = jax.devices()[0]
        raise UnsupportedError(
            f"kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or newer; this "
            f"{device.device_kind} has {device.compute_capability}: choose int8"
        )


def choose_sizes(config: EngineConfig, model: ModelConfig) -> Sizes:
    """Fill in what the configuration leaves open; refuse a context the model is not made for."""
    on_gpu = is_on_gpu()
    # Dynamic scaling exists to go beyond the trained length, every other kind states its own.
    growth = model.rope.factor if model.rope.kind == "dynamic" else 1.0
    longest = int(model.max_position * growth)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise InvalidRequestError(
            f"max_model_len is {config.max_model_len}; the model is made for {longest} tokens: "
            "lower it to that or leave it out"
        )
    return Sizes(
        max_model_len=config.max_model_len or longest,
        page_size=config.page_size or (64 if on_gpu else 16),
        max_num_seqs=config.max_batch_size or (64 if on_gpu else 8),
        max_num_batched_tokens=config.max_num_batched_tokens or (2048 if on_gpu else 512),
    )


def plan_memory(config: EngineConfig, model: ModelConfig, sizes: Sizes) -> MemoryPlan:
    """Give the KV cache what the weights and the largest step leave; before weights are loaded.

    Raises InvalidRequestError, with the table, for what does not fit.
    """
    itemsize = jnp.dtype(model.dtype or "float32").itemsize
    page_bytes = bytes_per_page(model, sizes.page_size, config.kv_cache_dtype)
    weights = weight_bytes(model)
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
        budget = stats["bytes_limit"] - GPU_MARGIN_BYTES - stats["bytes_in_use"]
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


def is_on_gpu() -> bool:
    """Whether steps run on a GPU."""
    return jax.default_backend() == "gpu"


def _own_cache() -> str:
    return str(default_cache_dir() / "compiled")


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
