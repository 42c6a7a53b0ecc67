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
def compiled(block_q: int, min_new: int, max_new: int | None, align: int):
    def run(starts: jax.Array, contexts: jax.Array, left_out: jax.Array) -> QueryBlocks:
        limits = {"min_new": min_new, "max_new": max_new, "left_out": left_out}
        return query_blocks(starts, contexts, NUM_TOKENS, block_q, align=align, **limits)

    return jax.jit(run)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 2) | st.integers(0, 32), min_size=NUM_SEQS, max_size=NUM_SEQS),
    st.sampled_from([(1, 1), (4, 1), (16, 1), (4, 4), (16, 8)]),
    st.sampled_from([(1, None), (2, None), (1, 20)]),
    st.lists(st.booleans(), min_size=NUM_SEQS, max_size=NUM_SEQS),
)
def test_blocks_cover_each_token_once(
    new_lens: list[int],
    sizes: tuple[int, int],
    limits: tuple[int, int | None],
    left_out: list[bool],
) -> None:
    (block_q, align), (min_new, max_new) = sizes, limits
    starts = np.concatenate([[0], np.cumsum(new_lens)]).astype(np.int32)
    contexts = np.asarray(new_lens, np.int32) + 100
    run = compiled(block_q, min_new, max_new, align)
    arrays = run(*map(jnp.asarray, (starts, contexts, np.array(left_out))))
    blocks = QueryBlocks(*map(np.asarray, arrays))
    covered, positions = np.zeros(NUM_TOKENS, int), np.full(NUM_TOKENS, -1)
    for i, (first, end) in enumerate(zip(blocks.first, blocks.end, strict=True)):
        is_padding = blocks.sequence[i] == NUM_SEQS
        assert is_padding or (end > first) == (i < blocks.count)
        assert end - first // align * align <= block_q
        covered[first:end] += 1
        positions[first:end] = blocks.position[i] + np.arange(end - first)
    padding = NUM_TOKENS - sum(new_lens)
    most = NUM_TOKENS if max_new is None else max_new
    lens = [
        (new, min_new <= new <= most and not out)
        for new, out in zip(new_lens, left_out, strict=True)
    ]
    padded = [*lens, (padding, True)]  # whose rows are zeros in any case
    assert covered.tolist() == [int(is_meant) for new, is_meant in padded for _ in range(new)]
    expected = [100 + t if is_meant else -1 for new, is_meant in lens for t in range(new)]
    assert positions[: len(expected)].tolist() == expected
    assert (positions[len(expected) :] < 0).all()
