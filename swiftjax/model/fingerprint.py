"""A short name for weights: equal for equal ones, different as soon as a tensor is another.

Samples of every tensor are hashed, not all of it, so that 8B weights take a second. Used to refuse
saved pages that another model computed.
"""

import hashlib
from collections.abc import Iterable

import jax
import numpy as np
from jaxtyping import Array

_SAMPLES = 1024  # elements per tensor


def fingerprint(described: str, params: Iterable[Array]) -> str:
    """Hash a description, and dtype, shape and evenly spaced elements of each array."""
    found = hashlib.sha256(described.encode())
    for sample, array in [(_sample(array), array) for array in params]:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.asarray(sample).tobytes())
    return found.hexdigest()


@jax.jit
def _sample(array: Array) -> Array:
    # Odd, so that the samples of a matrix do not all lie in a few columns.
    stride = max(1, array.size // _SAMPLES) | 1
    return array.reshape(-1)[::stride]
