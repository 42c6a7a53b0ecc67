"""Both attention ops, every implementation, against a dense float64 answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.kernels import (
    IMPLEMENTATIONS,
    decode_attention,
    ragged_attention,
)
from tests.kernels.attention_case import AttentionCase, Shape, make_case, relative_error

TOLERANCE = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 2e-3}

DECODES = {
    "lengths": Shape(sequences=((0, 1), (14, 1), (15, 1), (16, 1), (299, 1), (511, 1))),
    "one": Shape(sequences=((639, 1),)),
    "one head": Shape(sequences=((20, 1), (0, 1)), num_kv_heads=1, group=1),
    "group 3": Shape(sequences=((40, 1), (270, 1)), num_kv_heads=3, group=3),
    "group 5": Shape(sequences=((40, 1), (270, 1)), group=5),
    "group 16": Shape(sequences=((40, 1), (7, 1)), group=16),
    "head 8": Shape(sequences=((40, 1), (7, 1)), head_dim=8),
    "head 80": Shape(sequences=((40, 1), (7, 1)), head_dim=80),
    "head 256": Shape(sequences=((40, 1), (7, 1)), head_dim=256),
    "page 64": Shape(sequences=((127, 1), (128, 1), (3, 1)), page_size=64),
    "page 128": Shape(sequences=((127, 1), (128, 1), (700, 1)), page_size=128),
    "window": Shape(sequences=((0, 1), (99, 1), (600, 1), (31, 1)), window=32),
    "window 1": Shape(sequences=((0, 1), (300, 1)), window=1),
    "sinks": Shape(sequences=((2, 1), (15, 1), (599, 1), (39, 1)), window=36, sink_len=4),
    "long sinks": Shape(sequences=((600, 1), (310, 1)), window=20, sink_len=280),
    "bfloat16": Shape(sequences=((40, 1), (300, 1)), head_dim=64, dtype="bfloat16"),
    "float16": Shape(sequences=((40, 1), (300, 1)), head_dim=64, dtype="float16"),
}
RAGGED = {
    "one prompt": Shape(sequences=((0, 300),)),
    "one token": Shape(sequences=((0, 1),)),
    "prompts": Shape(sequences=((0, 17), (0, 1), (0, 64), (0, 16)), padding=5),
    "mixed": Shape(sequences=((500, 1), (30, 70), (0, 33), (15, 1)), padding=23),
    "empty rows": Shape(sequences=((0, 0), (9, 3), (50, 0), (20, 2), (0, 0)), padding=11),
    "chunk on context": Shape(sequences=((600, 130),), group=4, num_kv_heads=1),
    "group 3": Shape(sequences=((40, 9), (270, 31)), num_kv_heads=3, group=3, padding=1),
    "head 96": Shape(sequences=((40, 9), (7, 1)), head_dim=96),
    "page 128": Shape(sequences=((127, 2), (128, 40), (0, 3)), page_size=128),
    "window": Shape(sequences=((0, 150), (99, 1), (400, 61)), window=32, padding=4),
    "sinks": Shape(sequences=((0, 90), (300, 41), (2, 1)), window=36, sink_len=4),
    "bfloat16": Shape(sequences=((40, 20), (0, 65)), head_dim=64, dtype="bfloat16"),
}


def run_decode(case: AttentionCase, implementation: str) -> jax.Array:
    return jax.jit(
        lambda *arrays: decode_attention(*arrays, **case.options, implementation=implementation)
    )(case.q, case.k_pages, case.v_pages, case.page_table, case.context_lens)


def run_ragged(case: AttentionCase, implementation: str) -> jax.Array:
    return jax.jit(
        lambda *arrays: ragged_attention(*arrays, **case.options, implementation=implementation)
    )(
        case.q,
        case.k_pages,
        case.v_pages,
        case.page_table,
        case.query_starts,
        case.context_lens,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", DECODES)
def test_decode_equals_dense(name: str, implementation: str) -> None:
    case = make_case(DECODES[name])
    out = run_decode(case, implementation)
    assert out.dtype == case.q.dtype
    assert relative_error(out, case.expected) <= TOLERANCE[DECODES[name].dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_equals_dense(name: str, implementation: str) -> None:
    case = make_case(RAGGED[name])
    out = run_ragged(case, implementation)
    assert out.dtype == case.q.dtype
    assert relative_error(out, case.expected) <= TOLERANCE[RAGGED[name].dtype]
    padding = RAGGED[name].padding
    assert padding == 0 or not np.asarray(out[-padding:], np.float32).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_gives_zeros_for_an_empty_row(implementation: str) -> None:
    case = make_case(Shape(sequences=((20, 1), (0, 1), (30, 1))))
    lens = case.context_lens.at[1].set(0)
    pages = case.k_pages.at[case.page_table[1, 0]].set(jnp.nan)
    out = decode_attention(
        case.q,
        pages,
        case.v_pages,
        case.page_table,
        lens,
        **case.options,
        implementation=implementation,
    )
    expected = case.expected.copy()
    expected[1] = 0
    assert relative_error(out, expected) <= TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunks_equal_one_pass(implementation: str) -> None:
    """A prompt attended in chunks gives what it gives at once: the offset of a chunk is right."""
    case = make_case(Shape(sequences=((0, 150),)))
    whole = run_ragged(case, implementation)
    for first, last in ((0, 70), (70, 71), (71, 150)):
        part = ragged_attention(
            case.q[first:last],
            case.k_pages,
            case.v_pages,
            case.page_table,
            jnp.asarray([0, last - first], jnp.int32),
            jnp.asarray([last], jnp.int32),
            **case.options,
            implementation=implementation,
        )
        np.testing.assert_allclose(part, whole[first:last], rtol=0, atol=2e-6)


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    case = make_case(Shape(sequences=((5, 1), (9, 1))))
    arrays = (case.q, case.k_pages, case.v_pages, case.page_table, case.context_lens)

    def call(**changes: object) -> object:
        return decode_attention(*arrays, **(case.options | changes))

    with pytest.raises(ValueError, match="sink_len is 4 but window is 0"):
        call(sink_len=4)
    with pytest.raises(ValueError, match="q_sink must be given"):
        call(sink_len=4, window=8)
    with pytest.raises(ValueError, match=r"window \(-1\)"):
        call(window=-1)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 KV heads"):
        pages = jnp.zeros((4, 3, 16, 16), jnp.float32)
        decode_attention(case.q, pages, pages, *arrays[3:], scale=1.0)
