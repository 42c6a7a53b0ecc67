"""Decodes beside long chunks; `test_chunk_attention.py` has them in a whole step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.kernels import single_tokens
from swiftjax.kernels.single_tokens import attend_single_tokens
from tests.kernels.attention_case import Shape, make_case, relative_error


@pytest.mark.parametrize("window", [0, 50])
def test_single_tokens_are_put_among_the_others(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts longer and shorter than all splits; the last decode is one too many."""
    monkeypatch.setattr(single_tokens, "MOST_SEQUENCES", 4)
    sequences = ((400, 1), (0, 3), (5, 1), (0, 0), (7, 1))
    case = make_case(Shape(sequences=sequences, padding=2, spare_pages=40, window=window))
    arrays = (case.q, case.k_pages, case.v_pages, case.page_table)
    others = jnp.full(case.q.shape, 7.0)
    scale = case.q.shape[2] ** -0.5

    def attend(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attend_single_tokens(*arrays, scale=scale, window=window)

    out, is_done = jax.jit(attend)(*arrays, case.query_starts, case.context_lens, others)
    assert is_done.tolist() == [True, False, True, False, False]
    rows = np.array([0, 4])
    assert relative_error(out[rows], case.expected[rows]) < 1e-5
    assert (np.delete(np.asarray(out), rows, axis=0) == 7.0).all()
