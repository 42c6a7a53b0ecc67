"""Rows by blocks: what a row gives, however many others there are and whatever they hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from swiftjax.batch import BatchShape
from swiftjax.model.assembly import make_programs
from swiftjax.model.linear import Linear
from swiftjax.model.row_blocks import by_blocks
from tests.tiny import TINY


@jax.jit
def _plain(projection: Linear, x: jax.Array, y: jax.Array) -> jax.Array:
    return projection(x) + y


@jax.jit
def _by_eight(projection: Linear, x: jax.Array, y: jax.Array) -> jax.Array:
    return by_blocks(lambda projection, x, y: projection(x) + y, projection, x, y, size=8)


@pytest.fixture
def projection() -> Linear:
    return Linear(96, 40, use_bias=True, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))


def test_blocks_compute_what_all_rows_together_do(projection: Linear) -> None:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(40, width)), jnp.float32) for width in (96, 40))
    want = np.asarray(_plain(projection, x, y))
    np.testing.assert_allclose(np.asarray(_by_eight(projection, x, y)), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_blocks", [2, 3, 7])
def test_bits_of_a_block_do_not_depend_on_others(projection: Linear, num_blocks: int) -> None:
    rng = np.random.default_rng(num_blocks)
    x, y = (jnp.asarray(rng.normal(size=(8 * num_blocks, n)), jnp.float32) for n in (96, 40))
    together = np.asarray(_by_eight(projection, x, y))
    for start in range(0, len(together), 8):
        alone = _by_eight(projection, x[start : start + 8], y[start : start + 8])
        np.testing.assert_array_equal(together[start : start + 8], np.asarray(alone))


def test_rows_that_fill_no_block_are_a_mistake(projection: Linear) -> None:
    with pytest.raises(AssertionError, match="12 rows are no multiple of 8"):
        _by_eight(projection, jnp.zeros((12, 96)), jnp.zeros((12, 40)))


def test_one_program_chooses_products_for_all() -> None:
    """The shortest forward pass and scorer are compiled before any other, which may race."""
    programs = make_programs(
        TINY, max_num_seqs=4, num_pages=8, page_size=4, max_model_len=32, implementation="xla",
        row_block=4,
    )  # fmt: skip
    shapes = [BatchShape(num_tokens=t, num_seqs=4, max_pages=8) for t in (4, 8, 16)]
    first, rest = programs.of_shapes(shapes)
    assert [(todo.func.__name__, todo.args) for todo in first] == [
        ("forward", (shapes[0],)), ("scorer", (8,)),
    ]  # fmt: skip
    for compile in first + rest:
        compile()
    assert programs.count == 3 + 2 + 4
