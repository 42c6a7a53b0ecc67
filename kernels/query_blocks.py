"""Cuts the flat tokens of a ragged batch into query blocks that each belong to one sequence.

The list is computed on the device with a static length, so that neither shapes nor the host depend
on the mix of sequences. Used by every implementation of ragged attention but the reference.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class QueryBlocks(NamedTuple):
    """Block i holds up to `block_q` tokens of sequence `sequence[i]`, from token `first[i]` on."""

    sequence: Int32[Array, " blocks"]
    first: Int32[Array, " blocks"]
    count: Int32[Array, ""]  # blocks in use; the rest start at or past their sequence's end


def query_blocks(
    query_starts: Int32[Array, " starts"], num_tokens: int, block_q: int
) -> QueryBlocks:
    """List the blocks in token order.

    T // block_q + B blocks are enough for any mix: a sequence wastes less than one block.
    """
    num_seqs = query_starts.shape[0] - 1
    index = jnp.arange(num_tokens // block_q + num_seqs, dtype=jnp.int32)
    per_sequence = (jnp.diff(query_starts) + (block_q - 1)) // block_q
    ends = jnp.cumsum(per_sequence, dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, num_seqs - 1)
    first_block = ends[sequence] - per_sequence[sequence]
    first = query_starts[sequence] + (index - first_block) * block_q
    return QueryBlocks(sequence, first, ends[-1])
