"""KV writes: the right slots, nothing else, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.kernels import Implementation, write_kv
from tests.kernels.shapes import WHOLE

NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM = 9, 3, 16, 64
NUM_SLOTS = NUM_PAGES * PAGE_SIZE


def expected_pages(pages: np.ndarray, tokens: np.ndarray, slots: list[int]) -> np.ndarray:
    out = pages.copy()
    for token, slot in zip(tokens, slots, strict=True):
        if slot < NUM_SLOTS:
            out[slot // PAGE_SIZE, :, slot % PAGE_SIZE] = token
    return out


@pytest.mark.parametrize("implementation", WHOLE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "slots",
    [
        [0],
        [NUM_SLOTS - 1, NUM_SLOTS],
        [NUM_SLOTS] * 4,
        [15, 16, 17, NUM_SLOTS, 3, 100, NUM_SLOTS],
        list(np.random.default_rng(0).permutation(NUM_SLOTS + 1)),
    ],
    ids=["one", "edges", "only padding", "mixed", "whole pool"],
)
def test_write_touches_exactly_the_named_slots(
    slots: list[int], dtype: str, implementation: Implementation
) -> None:
    rng = np.random.default_rng(1)
    pool = (NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    k_pages, v_pages = (rng.standard_normal(pool).astype(jnp.dtype(dtype)) for _ in "kv")
    k, v = (
        rng.standard_normal((len(slots), NUM_KV_HEADS, HEAD_DIM)).astype(jnp.dtype(dtype))
        for _ in "kv"
    )
    out_k, out_v = write_kv(
        *map(jnp.asarray, (k_pages, v_pages, k, v)),
        jnp.asarray(slots, jnp.int32),
        implementation=implementation,
    )
    assert out_k.dtype == out_v.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(out_k), expected_pages(k_pages, k, slots))
    np.testing.assert_array_equal(np.asarray(out_v), expected_pages(v_pages, v, slots))


# Interpret mode emulates aliasing with a copy; on a GPU tests/gpu checks it.
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_donated_pages_are_written_in_place(implementation: Implementation) -> None:
    pages = jax.ShapeDtypeStruct((NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM), jnp.float32)
    tokens = jax.ShapeDtypeStruct((5, NUM_KV_HEADS, HEAD_DIM), jnp.float32)
    slots = jax.ShapeDtypeStruct((5,), jnp.int32)

    def write(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return write_kv(*arrays, implementation=implementation)

    compiled = jax.jit(write, donate_argnums=(0, 1)).lower(pages, pages, tokens, tokens, slots)
    analysis = compiled.compile().memory_analysis()
    assert analysis.alias_size_in_bytes == 2 * pages.size * 4
    assert analysis.temp_size_in_bytes < pages.size * 4
