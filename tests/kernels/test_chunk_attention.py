"""Attention of long chunks on Hopper, in the simulation of a GPU's threads, memories and barriers.

The simulation is slow, so cases are as small as what they show allows. That the kernel compiles,
and with which registers, stands in `test_compiled.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.kernels import _mosaic, ragged_attention, single_tokens
from swiftjax.kernels.chunk_attention import HEAD_DIMS, can_attend_chunks
from swiftjax.kernels.chunk_compute import LOG2_E, LOWEST, UNSEEN
from tests.kernels.attention_case import AttentionCase, Shape, make_case, relative_error

SHAPES = {
    # Blocks of 128, 4 and 65 rows, trips with and without a mask; the first and the last sequence
    # are too short for this kernel and are the other one's.
    "mixed": Shape(
        sequences=((40, 1), (70, 132), (3, 65), (9, 20)), padding=6,
        num_kv_heads=1, group=1, head_dim=128, page_size=16, dtype="bfloat16",
    ),
    # Rows see no key of their first trip: what they got there must not count.
    "window": Shape(
        sequences=((250, 128), (0, 66)), window=40, padding=6,
        num_kv_heads=2, group=2, head_dim=64, page_size=128, dtype="float16",
    ),
}  # fmt: skip
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}


def attend(case: AttentionCase) -> jax.Array:
    arrays = (case.q, case.k_pages, case.v_pages, case.page_table)
    return jax.jit(
        lambda *arrays: ragged_attention(*arrays, **case.options, implementation="mosaic")
    )(*arrays, case.query_starts, case.context_lens)


@pytest.mark.parametrize("name", SHAPES)
def test_chunks_equal_dense(name: str) -> None:
    case = make_case(SHAPES[name])
    out = attend(case)
    assert out.dtype == case.q.dtype
    assert relative_error(out, case.expected) <= TOLERANCE[SHAPES[name].dtype]
    padding = SHAPES[name].padding
    assert padding == 0 or not np.asarray(out[-padding:], np.float32).any()


@pytest.mark.parametrize(("num_tokens", "knows"), [(8192, True), (8191, False), (120, False)])
def test_steps_of_odd_sizes_are_left_to_triton(num_tokens: int, knows: bool) -> None:
    q, pages = (jnp.zeros(s, jnp.bfloat16) for s in ((num_tokens, 2, 128), (9, 2, 64, 128)))
    assert can_attend_chunks(q, pages, None) == knows


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unseen_keys_weigh_nothing_however_they_are_scaled(head_dim: int) -> None:
    """Multiplied and subtracted one after the other, or at once as on a card: there not rounded.

    Under a window a row may see no key of its first trip.
    """
    scale = np.float32(head_dim**-0.5 * LOG2_E)
    rounded = np.float32(UNSEEN) * scale
    highest = max(np.float32(LOWEST), rounded)
    exact = float(np.float32(UNSEEN)) * float(scale)
    for product in (float(rounded), exact):
        assert np.exp2(product - float(highest)) == 0


def test_a_decode_too_many_is_left_to_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_tokens, "MOST_SEQUENCES", 1)
    sequences = ((3, 1), (40, 1), (9, 65))
    shape = Shape(
        sequences=sequences, padding=61,
        num_kv_heads=1, group=1, head_dim=64, page_size=128, dtype="float16",
    )  # fmt: skip
    case = make_case(shape)
    assert relative_error(attend(case), case.expected) <= TOLERANCE["float16"]


def test_two_programs_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mosaic, "num_multiprocessors", lambda: 2)
    case = make_case(SHAPES["mixed"])
    assert relative_error(attend(case), case.expected) <= TOLERANCE["bfloat16"]
