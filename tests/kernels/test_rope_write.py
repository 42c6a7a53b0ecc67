"""Rope and KV write in one: the values of the reference in the right places, nothing else."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.kernels import Implementation, reference, rope_write
from swiftjax.kernels.rope_write import RopeConfig, rotate_rows

NUM_PAGES, PAGE_SIZE = 9, 16
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
# (query heads, KV heads, head width)
HEADS = {"llama": (8, 2, 64), "group 3": (9, 3, 64), "alone": (2, 2, 128), "width 80": (4, 2, 80)}
SLOTS = {
    "one": [5],
    "edges": [NUM_SLOTS - 1, NUM_SLOTS],
    "only padding": [NUM_SLOTS] * 4,
    "mixed": [15, 16, 17, NUM_SLOTS, 3, 100, NUM_SLOTS],
    "whole pool": list(np.random.default_rng(0).permutation(NUM_SLOTS + 1)),
}


def make_case(heads: str, slots: str, dtype: str) -> dict[str, Any]:
    num_heads, num_kv_heads, head_dim = HEADS[heads]
    rng, tokens = np.random.default_rng(1), len(SLOTS[slots])

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape).astype(jnp.dtype(dtype)))

    angles = rng.uniform(0, 7, (tokens, head_dim // 2))
    return {
        "k_pages": normal(NUM_PAGES, num_kv_heads, PAGE_SIZE, head_dim),
        "v_pages": normal(NUM_PAGES, num_kv_heads, PAGE_SIZE, head_dim),
        "qkv": normal(tokens, (num_heads + 2 * num_kv_heads) * head_dim),
        "cos": jnp.asarray(np.cos(angles), jnp.float32),
        "sin": jnp.asarray(np.sin(angles), jnp.float32),
        "slot_mapping": jnp.asarray(SLOTS[slots], jnp.int32),
    }


def dense(case: dict[str, Any], heads: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries and pages in float64, one token and head at a time."""
    num_heads, num_kv_heads, head_dim = HEADS[heads]
    arrays = {name: np.asarray(x).astype(np.float64) for name, x in case.items()}
    k_pages, v_pages = arrays["k_pages"].copy(), arrays["v_pages"].copy()
    rows = arrays["qkv"].reshape(len(arrays["qkv"]), -1, head_dim)
    turn = arrays["cos"] + 1j * arrays["sin"]
    half = head_dim // 2
    pairs = (rows[..., :half] + 1j * rows[..., half:]) * turn[:, None, :]
    rotated = np.concatenate([pairs.real, pairs.imag], axis=-1)
    for token, slot in enumerate(np.asarray(case["slot_mapping"])):
        if slot < NUM_SLOTS:
            page, offset = divmod(slot, PAGE_SIZE)
            k_pages[page, :, offset] = rotated[token, num_heads : num_heads + num_kv_heads]
            v_pages[page, :, offset] = rows[token, num_heads + num_kv_heads :]
    return rotated[:, :num_heads], k_pages, v_pages


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(
    ("heads", "slots", "dtype"),
    [
        ("llama", "one", "bfloat16"),
        ("llama", "edges", "float32"),
        ("llama", "whole pool", "bfloat16"),
        ("group 3", "only padding", "float16"),
        ("group 3", "mixed", "float32"),
        ("alone", "mixed", "bfloat16"),
        ("width 80", "whole pool", "float16"),
    ],
)
def test_rotates_and_writes_exactly_the_named_slots(
    heads: str, slots: str, dtype: str, implementation: Implementation
) -> None:
    case = make_case(heads, slots, dtype)
    out = rope_write(**case, implementation=implementation)
    tolerance = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    for got, wanted in zip(out, dense(case, heads), strict=True):
        assert got.dtype == jnp.dtype(dtype)
        got = np.asarray(got).astype(np.float64)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    untouched = np.ones(NUM_SLOTS + 1, bool)
    untouched[np.asarray(case["slot_mapping"])] = False
    page, offset = np.divmod(np.flatnonzero(untouched[:-1]), PAGE_SIZE)
    for before, after in ((case["k_pages"], out[1]), (case["v_pages"], out[2])):
        assert np.array_equal(before[page, :, offset], after[page, :, offset])


@pytest.mark.parametrize(("heads", "block_t"), [("llama", 1), ("group 3", 2), ("width 80", 16)])
def test_the_kernel_rounds_as_the_reference_does(heads: str, block_t: int) -> None:
    """With head norms too, and for any number of tokens in a program."""
    case = make_case(heads, "mixed", "bfloat16")
    width = HEADS[heads][2]
    rng = np.random.default_rng(2)
    norms = [jnp.asarray(rng.uniform(0.5, 2, width), jnp.bfloat16) for _ in "qk"]
    options = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-5}
    config = RopeConfig(block_t=block_t, num_warps=1)
    wanted = reference.rope_write(**case, **options)
    got = rotate_rows(**case, **options, config=config)
    for one, other in zip(got, wanted, strict=True):
        one, other = (np.asarray(x).astype(np.float32) for x in (one, other))
        # Sums in another order may move a value by one unit in the last place, rarely.
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=2**-7)
        assert (one != other).mean() < 1e-2


def test_what_does_not_fit_together_is_refused() -> None:
    case = make_case("llama", "one", "bfloat16")
    with pytest.raises(ValueError, match="together"):
        rope_write(**case, q_norm=jnp.ones(64, jnp.bfloat16))
    with pytest.raises(ValueError, match="whole number of heads"):
        rope_write(**(case | {"qkv": case["qkv"][:, :-1]}))
