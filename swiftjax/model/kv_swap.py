"""Pages to pinned host memory, back, and to other pages, in chunks of a fixed size.

One gather and one copy per chunk, over all layers, not one per page; as the size is fixed, nothing
is compiled late. Host copies are kept under their keys until they are dropped. Called by
the runner before a step.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Num

from swiftjax.batch import PageMoves
from swiftjax.kernels import Pages, QuantizedPages
from swiftjax.model.kv_cache import KVCache
from swiftjax.model.page_copies import PageCopies

PAGES_PER_CHUNK = 16


class KVSwap:
    """Moves pages of one cache; a copy that was dispatched may still be on its way."""

    def __init__(self, kv_cache: KVCache, copies: PageCopies | None = None) -> None:
        self._copies = copies or PageCopies()
        pages = jax.tree.leaves(kv_cache)[0]
        self._num_pages = pages.shape[0]
        device = next(iter(pages.devices()))
        kinds = {memory.kind for memory in device.addressable_memories()}
        kind = "pinned_host" if "pinned_host" in kinds else None
        self._host = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        self._device = jax.sharding.SingleDeviceSharding(device)
        ids = jax.ShapeDtypeStruct((PAGES_PER_CHUNK,), jnp.int32)
        self._gather = jax.jit(gather_pages).lower(kv_cache, ids).compile()
        self._chunk = chunk = jax.eval_shape(gather_pages, kv_cache, ids)
        scatter = jax.jit(scatter_pages, donate_argnums=0)
        self._scatter = scatter.lower(kv_cache, ids, chunk).compile()
        self._copy = jax.jit(copy_pages, donate_argnums=0).lower(kv_cache, ids, ids).compile()

    def apply(self, kv_cache: KVCache, moves: PageMoves) -> KVCache:
        """Move out, in, and page to page, then drop; the cache given is replaced by the result.

        What moves in must have been fetched, unless it moves out with the same call.
        """
        moved: dict[str, list[Any]] = {}  # which may be on their way to disk already
        for move in moves.out:
            moved[move.key] = chunks = [
                jax.device_put(self._gather(kv_cache, ids), self._host)
                for ids in self._chunks(move.page_ids, padding=0)
            ]
            self._copies.put(move.key, chunks)
        for move in moves.back:
            chunks = moved[move.key] if move.key in moved else self._copies.get(move.key)
            targets = self._chunks(move.page_ids, self._num_pages)
            for ids, chunk in zip(targets, chunks, strict=True):
                kv_cache = self._scatter(kv_cache, ids, jax.device_put(chunk, self._device))
        sources = self._chunks([copy.source for copy in moves.copies], padding=0)
        targets = self._chunks([copy.target for copy in moves.copies], self._num_pages)
        for chunk in zip(sources, targets, strict=True):
            kv_cache = self._copy(kv_cache, *chunk)
        for key in moves.drop:
            self._copies.drop(key)
        self._copies.forget_fetched()
        return kv_cache

    def fetch(self, key: str) -> bool:
        """Have a copy at hand for the next `apply` or `read_copy`; False when it is lost."""
        return self._copies.fetch(key)

    def read_copy(self, key: str, num_pages: int) -> list[np.ndarray]:
        """The first pages of a fetched copy, chunks on the host; the last without its padding."""
        count = -(-num_pages // PAGES_PER_CHUNK)
        chunks = [np.asarray(chunk) for chunk in self._copies.get(key)[:count]]
        chunks[-1] = chunks[-1][:, : num_pages - PAGES_PER_CHUNK * (count - 1)]
        return chunks

    def load_copy(self, key: str, num_pages: int, chunks: Sequence[np.ndarray]) -> None:
        """Keep what `read_copy` gave, here or elsewhere; raises ValueError for other arrays."""
        starts = range(0, num_pages, PAGES_PER_CHUNK)
        counts = [min(PAGES_PER_CHUNK, num_pages - start) for start in starts]
        if len(counts) != len(chunks):
            raise ValueError(f"{len(chunks)} arrays cannot be {num_pages} pages")
        whole = []
        for count, chunk in zip(counts, chunks, strict=True):
            pools, _, *rest = self._chunk.shape
            if chunk.dtype != self._chunk.dtype or chunk.shape != (pools, count, *rest):
                raise ValueError(f"{chunk.dtype}{list(chunk.shape)} is not {count} pages here")
            padded = np.zeros(self._chunk.shape, chunk.dtype)
            padded[:, :count] = chunk
            whole.append(jax.device_put(padded, self._host))
        self._copies.put(key, whole)

    def seconds_per_page(self, kv_cache: KVCache) -> float:
        """Measure one way, device to host."""
        ids = np.arange(PAGES_PER_CHUNK, dtype=np.int32) % self._num_pages
        for _ in range(2):  # the first also allocates
            start = time.monotonic()
            jax.device_put(self._gather(kv_cache, ids), self._host).block_until_ready()
        return (time.monotonic() - start) / PAGES_PER_CHUNK

    @staticmethod
    def _chunks(page_ids: Sequence[int], padding: int) -> list[np.ndarray]:
        count = -(-len(page_ids) // PAGES_PER_CHUNK) * PAGES_PER_CHUNK
        ids = np.full(count, padding, np.int32)
        ids[: len(page_ids)] = page_ids
        return list(ids.reshape(-1, PAGES_PER_CHUNK))


def gather_pages(kv_cache: KVCache, ids: Int[Array, " C"]) -> Num[Array, "pools C K S W"]:
    """Copy some pages of all layers, keys first; of pages in 8 bits every token's scale follows.

    In bytes then: one array holds values and scales, whatever their types.
    """
    return jnp.stack([_take(pages, ids) for pages in (*kv_cache.keys, *kv_cache.values)])


def _take(pages: Pages, ids: Int[Array, " C"]) -> Num[Array, "C K S W"]:
    if not isinstance(pages, QuantizedPages):
        return pages[ids]
    values = lax.bitcast_convert_type(pages.values[ids], jnp.uint8)
    scales = lax.bitcast_convert_type(pages.scales[ids], jnp.uint8)
    return jnp.concatenate([values, scales], axis=-1)


def scatter_pages(
    kv_cache: KVCache, ids: Int[Array, " C"], chunk: Num[Array, "pools C K S W"]
) -> KVCache:
    """Write them back; an id past the end of the pool is padding and writes nothing."""
    pools = (*kv_cache.keys, *kv_cache.values)
    pools = [_put(pool, ids, chunk[i]) for i, pool in enumerate(pools)]
    layers = len(kv_cache.keys)
    return KVCache(keys=tuple(pools[:layers]), values=tuple(pools[layers:]))


def _put(pages: Pages, ids: Int[Array, " C"], taken: Num[Array, "C K S W"]) -> Pages:
    if not isinstance(pages, QuantizedPages):
        return pages.at[ids].set(taken, mode="drop")
    width = pages.shape[3]
    values = lax.bitcast_convert_type(taken[..., :width], pages.values.dtype)
    scales = lax.bitcast_convert_type(taken[..., width:], jnp.float32)
    return QuantizedPages(
        pages.values.at[ids].set(values, mode="drop"), pages.scales.at[ids].set(scales, mode="drop")
    )


def copy_pages(kv_cache: KVCache, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> KVCache:
    """Copy pages of all layers within the cache; a target past the end of the pool is padding."""
    return jax.tree.map(lambda pool: pool.at[targets].set(pool[sources], mode="drop"), kv_cache)
