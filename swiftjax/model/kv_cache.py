"""The paged KV cache: one array per layer for keys and one for values, donated to every step.

Layout [P K S H] (pages, KV heads, slots, head width): all slots of one page and head are
contiguous, which an H200 reads at up to 92 % of its memory speed where [P S K H] gave half. In 8
bits there is an array of scales [P K S] beside each.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from swiftjax.config import KVCacheDtype
from swiftjax.kernels import Pages, QuantizedPages
from swiftjax.model_config import ModelConfig

STORED: dict[KVCacheDtype, str] = {"int8": "int8", "fp8": "float8_e4m3fn"}
SCALE_BYTES = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer; typed loosely, as jax also builds it from descriptions."""

    keys: tuple[Any, ...]  # L times Pages, [P K S H]
    values: tuple[Any, ...]  # the same


def make_kv_cache(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> KVCache:
    """Allocate the pool, zeroed: what an unwritten slot holds must not be able to be NaN.

    `dtype` is what the model computes in, and what is stored unless 8 bits are asked for.
    """
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)

    def pages() -> Pages:
        if kv_cache_dtype == "auto":
            return jnp.zeros(shape, dtype)
        stored = jnp.dtype(STORED[kv_cache_dtype])
        return QuantizedPages(jnp.zeros(shape, stored), jnp.zeros(shape[:3], jnp.float32))

    def pool() -> tuple[Pages, ...]:
        return tuple(pages() for _ in range(config.num_layers))

    return KVCache(keys=pool(), values=pool())


def bytes_per_page(
    config: ModelConfig, page_size: int, kv_cache_dtype: KVCacheDtype = "auto"
) -> int:
    """Bytes that one page takes over all layers, keys and values together, scales included."""
    stored = STORED.get(kv_cache_dtype)
    itemsize = jnp.dtype(stored or config.dtype or "float32").itemsize
    head = config.head_dim * itemsize + (SCALE_BYTES if stored else 0)
    return 2 * config.num_layers * config.num_kv_heads * page_size * head
