"""Cuts the flat tokens of a ragged batch into query blocks that each belong to one sequence.

The list is computed on the device with a static length, so that neither shapes nor the host depend
on the mix of sequences. Used by every implementation of ragged attention but the reference.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class QueryBlocks(NamedTuple):
    """Block i holds tokens `first[i]` to `end[i]`, at most block_q of them, at known positions.

    Padding tokens form a last sequence of context 0. Behind `count` blocks are empty, or padding.
    """

    sequence: Int32[Array, " blocks"]  # B for the padding
    first: Int32[Array, " blocks"]
    end: Int32[Array, " blocks"]
    position: Int32[Array, " blocks"]  # of token `first`; negative for the padding
    count: Int32[Array, ""]  # blocks in use, which come first, in token order


def query_blocks(
    query_starts: Int32[Array, " starts"],
    context_lens: Int32[Array, " B"],
    num_tokens: int,
    block_q: int,
    min_new: int = 1,
    max_new: int | None = None,
    left_out: Bool[Array, " B"] | None = None,
    align: int = 1,
) -> QueryBlocks:
    """List the blocks of sequences with `min_new` to `max_new` new tokens, in token order.

    Sequences of `left_out` get none. All of a block lies within block_q tokens from a multiple of
    `align` on, which divides block_q. A sequence, and the padding as the last one, wastes less than
    one block, and align - 1 tokens in front: (T + (B + 1) (align - 1)) // block_q + B + 1 blocks
    are enough for any mix.
    """
    starts = jnp.append(query_starts, jnp.int32(num_tokens))
    contexts = jnp.append(context_lens, jnp.int32(0))
    num_sequences = contexts.shape[0]
    most = (num_tokens + num_sequences * (align - 1)) // block_q + num_sequences
    index = jnp.arange(most, dtype=jnp.int32)
    num_new = jnp.diff(starts)
    is_meant = num_new >= min_new
    if max_new is not None:
        is_meant &= num_new <= max_new
    if left_out is not None:
        is_meant &= ~jnp.append(left_out, False)
    in_front = starts[:-1] % align
    per_sequence = jnp.where(is_meant, (in_front + num_new + (block_q - 1)) // block_q, 0)
    ends = jnp.cumsum(per_sequence, dtype=jnp.int32)
    # A comparison with all ends: jnp.searchsorted would be a loop driven by the host on a GPU.
    sequence = (index[:, None] >= ends[None, :]).sum(axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, contexts.shape[0] - 1)
    first_block = ends[sequence] - per_sequence[sequence]
    begin, last = starts[sequence], starts[sequence + 1]
    aligned = begin - in_front[sequence] + (index - first_block) * block_q
    first = jnp.clip(aligned, begin, last)
    return QueryBlocks(
        sequence=sequence,
        first=first,
        end=jnp.minimum(aligned + block_q, last),
        position=contexts[sequence] - last + first,
        count=ends[-1],
    )
