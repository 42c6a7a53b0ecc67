"""Computes rows in blocks of one size, so that a row's bits depend on no other row of its step.

Libraries and compiler choose kernels by the number of rows, and kernels round differently. Blocks
of one size, held apart from each other, get the same kernels in every program, however many there
are. Called by `llama.py` for all that reads weights; attention has its own way (`row_invariant`).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


def by_blocks(
    compute: Callable[..., Float[Array, "T out"]],
    module: Any,  # nnx.Module
    *rows: Float[Array, "T _"],
    size: int | None,
) -> Float[Array, "T out"]:
    """compute(module, *rows), `size` rows at a time; T is a multiple of it. None: all at once.

    `compute` gives a row for every row. Barriers keep the compiler from joining products that share
    their weights, and from joining what a block computes with what makes or reads its rows.
    """
    if size is None:
        return compute(module, *rows)
    structure, weights = nnx.split(module)
    num_rows = rows[0].shape[0]
    assert num_rows % size == 0, f"{num_rows} rows are no multiple of {size}"
    done = []
    for start in range(0, num_rows, size):
        block = tuple(lax.slice_in_dim(x, start, start + size) for x in rows)
        held, block = lax.optimization_barrier((weights, block))
        done.append(lax.optimization_barrier(compute(nnx.merge(structure, held), *block)))
    return jnp.concatenate(done)
