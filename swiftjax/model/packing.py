"""Batch <-> one int32 buffer, so that a step costs one copy to the device instead of fifteen.

All fields are 4 bytes wide; floats travel as their bits. The layout follows from the shape alone.
"""

import math
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

from swiftjax.batch import Batch, BatchShape, SamplingBatch, TokenEdits, empty_batch

for _cls in (Batch, SamplingBatch, TokenEdits):
    jax.tree_util.register_dataclass(_cls, [f.name for f in fields(_cls)], [])


def pack(batch: Batch) -> Int32[np.ndarray, " words"]:
    """Concatenate all fields but the edits, in declaration order."""
    leaves = jax.tree.leaves(replace(batch, edits=None))
    return np.concatenate([np.ascontiguousarray(leaf).ravel().view(np.int32) for leaf in leaves])


def unpack(packed: Int[Array, " words"], shape: BatchShape) -> Batch:
    """The inverse, inside jit: static slices and bit casts."""
    template, treedef = jax.tree.flatten(empty_batch(shape, num_slots=0))
    leaves, start = [], 0
    for leaf in template:
        size = math.prod(leaf.shape)
        words = lax.slice(packed, (start,), (start + size,)).reshape(leaf.shape)
        is_float = leaf.dtype == np.float32
        leaves.append(lax.bitcast_convert_type(words, jnp.float32) if is_float else words)
        start += size
    return jax.tree.unflatten(treedef, leaves)


def packed_size(shape: BatchShape) -> int:
    """Words in the packed form of a batch of this shape."""
    return sum(leaf.size for leaf in jax.tree.leaves(empty_batch(shape, num_slots=0)))
