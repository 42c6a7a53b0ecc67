"""The block list covers every new token once, for any mix of sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftjax.kernels.query_blocks import QueryBlocks, query_blocks

NUM_SEQS, NUM_TOKENS = 5, 160


@functools.cache
def compiled(block_q: int, min_new: int, align: int):
    def run(starts: jax.Array, contexts: jax.Array) -> QueryBlocks:
        return query_blocks(starts, contexts, NUM_TOKENS, block_q, min_new, align=align)

    return jax.jit(run)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 2) | st.integers(0, 32), min_size=NUM_SEQS, max_size=NUM_SEQS),
    st.sampled_from([(1, 1), (4, 1), (16, 1), (4, 4), (16, 8)]),
    st.sampled_from([1, 2]),
)
def test_blocks_cover_each_token_once(
    new_lens: list[int], sizes: tuple[int, int], min_new: int
) -> None:
    block_q, align = sizes
    starts = np.concatenate([[0], np.cumsum(new_lens)]).astype(np.int32)
    contexts = np.asarray(new_lens, np.int32) + 100
    arrays = compiled(block_q, min_new, align)(jnp.asarray(starts), jnp.asarray(contexts))
    blocks = QueryBlocks(*map(np.asarray, arrays))
    covered, positions = np.zeros(NUM_TOKENS, int), np.full(NUM_TOKENS, -1)
    for i, (first, end) in enumerate(zip(blocks.first, blocks.end, strict=True)):
        assert (end > first) == (i < blocks.count)
        assert end - first // align * align <= block_q
        covered[first:end] += 1
        positions[first:end] = blocks.position[i] + np.arange(end - first)
    padding = NUM_TOKENS - sum(new_lens)
    lens = [*new_lens, padding]
    assert covered.tolist() == [int(new >= min_new) for new in lens for _ in range(new)]
    expected = [100 + t if new >= min_new else -1 for new in new_lens for t in range(new)]
    assert positions[: len(expected)].tolist() == expected
    assert (positions[len(expected) :] < 0).all()
