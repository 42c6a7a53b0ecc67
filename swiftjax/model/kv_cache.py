"""The paged KV cache: one array per layer for keys and one for values, donated to every step.

Layout [P K S H] (pages, KV heads, slots, head width): all slots of one page and head are
contiguous, which an H200 reads at up to 84 % of its memory speed where [P S K H] gave half.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from swiftjax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer; typed loosely, as jax also builds it from descriptions."""

    keys: tuple[Any, ...]  # L times [P K S H]
    values: tuple[Any, ...]  # L times [P K S H]


def make_kv_cache(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: jnp.dtype
) -> KVCache:
    """Allocate the pool, zeroed: what an unwritten slot holds must not be able to be NaN."""
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)

    def pool() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return KVCache(keys=pool(), values=pool())


def bytes_per_page(config: ModelConfig, page_size: int, itemsize: int) -> int:
    """Bytes that one page takes over all layers, keys and values together."""
    return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * itemsize
