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
def compiled(block_q: int):
    def run(starts: jax.Array) -> QueryBlocks:
        return query_blocks(starts, NUM_TOKENS, block_q)

    return jax.jit(run)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 32), min_size=NUM_SEQS, max_size=NUM_SEQS), st.sampled_from([1, 4, 16])
)
def test_blocks_cover_each_token_once(new_lens: list[int], block_q: int) -> None:
    starts = np.concatenate([[0], np.cumsum(new_lens)]).astype(np.int32)
    blocks = jax.tree.map(np.asarray, compiled(block_q)(jnp.asarray(starts)))
    covered = np.zeros(NUM_TOKENS, int)
    for i, (seq, first) in enumerate(zip(blocks.sequence, blocks.first, strict=True)):
        tokens = np.arange(first, min(first + block_q, starts[seq + 1]))
        assert (len(tokens) > 0) == (i < blocks.count)
        covered[tokens] += 1
    assert covered.tolist() == [1] * int(starts[-1]) + [0] * (NUM_TOKENS - int(starts[-1]))
