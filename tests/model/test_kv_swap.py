"""Pages copied within the cache: exactly those, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.batch import PageCopy, PageMove, PageMoves
from swiftjax.model.kv_cache import KVCache, make_kv_cache
from swiftjax.model.kv_swap import PAGES_PER_CHUNK, KVSwap
from tests.tiny import TINY

PAGES, PAGE = 64, 4


def numbered_cache() -> KVCache:
    """No two values are equal within a pool."""
    empty = make_kv_cache(TINY, num_pages=PAGES, page_size=PAGE, dtype=jnp.dtype("float32"))
    pools = jax.tree.map(lambda x: np.arange(x.size, dtype=np.float32).reshape(x.shape), empty)
    return jax.tree.map(jnp.asarray, pools)


@pytest.mark.parametrize("count", [1, PAGES_PER_CHUNK, PAGES_PER_CHUNK + 1])
def test_copies_change_the_targets_only_and_stay_in_place(count: int) -> None:
    cache = numbered_cache()
    want = [np.array(pool) for pool in jax.tree.leaves(cache)]
    order = np.random.default_rng(count).permutation(PAGES).tolist()
    copies = [PageCopy(order[i // 2], order[PAGES - 1 - i]) for i in range(count)]
    for pool in want:
        pool[[c.target for c in copies]] = pool[[c.source for c in copies]]
    places = [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(cache)]
    after = jax.tree.leaves(KVSwap(cache).apply(cache, PageMoves(copies=tuple(copies))))
    assert [pool.unsafe_buffer_pointer() for pool in after] == places
    for got, expected in zip(after, want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_page_that_comes_back_is_copied_after_that() -> None:
    """And one that goes out does so before it is overwritten."""
    cache = numbered_cache()
    first, swap = np.array(cache.keys[0]), KVSwap(cache)
    cache = swap.apply(cache, PageMoves(out=(PageMove("a", (3,)),), copies=(PageCopy(5, 3),)))
    moves = PageMoves(back=(PageMove("a", (7,)),), copies=(PageCopy(7, 8),))
    keys = np.array(swap.apply(cache, moves).keys[0])
    np.testing.assert_array_equal(keys[3], first[5])
    np.testing.assert_array_equal(keys[8], first[3])
