"""Batch <-> two int32 buffers, so that a step costs two small copies to the device, not thirty.

All fields are 4 bytes wide; floats travel as their bits. The layout follows from the shape alone.
Fields start at multiples of 256 bytes: XLA may hand a kernel a field in place, as an address in the
middle of the buffer, and those of Mosaic GPU want their arguments aligned so.
What the model reads and what the sampler reads travel apart, because the sampler's programs depend
on the number of rows only.
"""

import math
from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

from swiftjax.batch import Batch, BatchShape, SamplingBatch, empty_batch, empty_sampling

Tree = TypeVar("Tree", Batch, SamplingBatch)
ALIGNED_WORDS = 64


class PackedBatch(NamedTuple):
    """What a step sends to the device every time."""

    step: np.ndarray  # [words] int32
    sampling: np.ndarray  # [words] int32


def pack(batch: Batch) -> PackedBatch:
    """Concatenate all fields in declaration order, but edits, masks and targets."""
    return PackedBatch(_concatenate(_model_part(batch)), _concatenate(batch.sampling))


def unpack(packed: Int[Array, " words"], shape: BatchShape) -> Batch:
    """The model's part again, inside jit: static slices and bit casts."""
    return _split(packed, _model_part(empty_batch(shape, num_slots=0)))


def unpack_sampling(packed: Int[Array, " words"], num_rows: int) -> SamplingBatch:
    """The sampler's part again, inside jit."""
    return _split(packed, empty_sampling(num_rows))


def packed_sizes(shape: BatchShape) -> tuple[int, int]:
    """Words in the two buffers of a batch of this shape."""
    step, sampling = pack(empty_batch(shape, num_slots=0))
    return len(step), len(sampling)


def _model_part(batch: Batch) -> Batch:
    return replace(batch, sampling=None, edits=None, target_ids=None, masks=None)


def _concatenate(tree: Batch | SamplingBatch) -> Int32[np.ndarray, " words"]:
    leaves = jax.tree.leaves(tree)
    packed = np.zeros(sum(_room(leaf.size) for leaf in leaves), np.int32)
    start = 0
    for leaf in leaves:
        packed[start : start + leaf.size] = np.ascontiguousarray(leaf).ravel().view(np.int32)
        start += _room(leaf.size)
    return packed


def _room(size: int) -> int:
    return -(-size // ALIGNED_WORDS) * ALIGNED_WORDS


def _split(packed: Array, template: Tree) -> Tree:
    leaves, treedef = jax.tree.flatten(template)
    values, start = [], 0
    for leaf in leaves:
        size = math.prod(leaf.shape)
        words = lax.slice(packed, (start,), (start + size,)).reshape(leaf.shape)
        is_float = leaf.dtype == np.float32
        values.append(lax.bitcast_convert_type(words, jnp.float32) if is_float else words)
        start += _room(size)
    return jax.tree.unflatten(treedef, values)
