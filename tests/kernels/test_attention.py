"""Both attention ops, every implementation, against a dense float64 answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.kernels import (
    Implementation,
    Streams,
    _triton,
    check_supported,
    choose_implementation,
    decode_attention,
    ragged_attention,
)
from tests.kernels.attention_case import AttentionCase, Shape, make_case, relative_error
from tests.kernels.shapes import DECODES, RAGGED, WHOLE

TOLERANCE = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 2e-3}


def problems(shapes: dict[str, Shape]) -> list[tuple[str, Implementation]]:
    """Every shape with every implementation that has it: triton refuses head widths below 16."""
    return [
        (name, implementation)
        for name, shape in shapes.items()
        for implementation in WHOLE
        if implementation != "triton" or shape.head_dim >= 16
    ]


def run_decode(case: AttentionCase, implementation: Implementation) -> jax.Array:
    return jax.jit(
        lambda *arrays: decode_attention(*arrays, **case.options, implementation=implementation)
    )(case.q, case.k_pages, case.v_pages, case.page_table, case.context_lens)


def run_ragged(case: AttentionCase, implementation: Implementation) -> jax.Array:
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


@pytest.mark.parametrize(("name", "implementation"), problems(DECODES))
def test_decode_equals_dense(name: str, implementation: Implementation) -> None:
    case = make_case(DECODES[name])
    out = run_decode(case, implementation)
    assert out.dtype == case.q.dtype
    assert relative_error(out, case.expected) <= TOLERANCE[DECODES[name].dtype]


@pytest.mark.parametrize(("name", "implementation"), problems(RAGGED))
def test_ragged_equals_dense(name: str, implementation: Implementation) -> None:
    case = make_case(RAGGED[name])
    out = run_ragged(case, implementation)
    assert out.dtype == case.q.dtype
    assert relative_error(out, case.expected) <= TOLERANCE[RAGGED[name].dtype]
    padding = RAGGED[name].padding
    assert padding == 0 or not np.asarray(out[-padding:], np.float32).any()


@pytest.mark.parametrize("implementation", WHOLE)
def test_decode_gives_zeros_for_an_empty_row(implementation: Implementation) -> None:
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


@pytest.mark.parametrize("implementation", WHOLE)
def test_chunks_equal_one_pass(implementation: Implementation) -> None:
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


@pytest.mark.parametrize("group", [1, 2, 4])
def test_row_invariant_bits_do_not_depend_on_the_chunk(group: int) -> None:
    """The last token of a sequence, alone or with 1, 4 or 39 others of it, beside other chunks."""
    case = make_case(Shape(sequences=((400, 40), (90, 40), (3, 1)), group=group))

    @jax.jit
    def run(q: jax.Array, starts: jax.Array, lens: jax.Array) -> jax.Array:
        arrays = (case.k_pages, case.v_pages, case.page_table, starts, lens)
        return ragged_attention(
            q, *arrays, **case.options, row_invariant=True, implementation="xla"
        )

    rows = set()
    for new, others in ((40, 40), (5, 1), (2, 40), (1, 1), (1, 17)):
        starts = np.cumsum([0, new, others, 1]).astype(np.int32)
        q = np.zeros(case.q.shape, np.float32)
        q[:new] = case.q[40 - new : 40]
        lens = np.asarray([440, 90 + others, 4], np.int32)
        rows.add(np.asarray(run(q, starts, lens))[new - 1].tobytes())
    assert len(rows) == 1


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    case = make_case(Shape(sequences=((5, 1), (9, 1))))
    arrays = (case.q, case.k_pages, case.v_pages, case.page_table, case.context_lens)

    def call(**changes: object) -> object:
        return decode_attention(*arrays, **(case.options | changes))

    streams = Streams(case.q, jnp.asarray([4, 4], jnp.int32), jnp.asarray([8, 8], jnp.int32))
    with pytest.raises(ValueError, match="window is 8, and streams have their own"):
        call(streams=streams, window=8)
    with pytest.raises(ValueError, match=r"q_sink is .* it must be like q"):
        call(streams=streams._replace(q_sink=case.q[:1]))
    with pytest.raises(ValueError, match="window is -1"):
        call(window=-1)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 KV heads"):
        pages = jnp.zeros((4, 3, 16, 16), jnp.float32)
        decode_attention(case.q, pages, pages, *arrays[3:], scale=1.0)


def test_shapes_that_triton_lacks_are_refused_with_a_remedy() -> None:
    known = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 64}
    check_supported("triton", **known, dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"head_dim 8 .*implementation='xla'"):
        check_supported("triton", **(known | {"head_dim": 8}), dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="page_size 20"):
        check_supported("triton", **(known | {"page_size": 20}), dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="32 query heads per KV head"):
        check_supported("triton", **(known | {"num_heads": 64}), dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        check_supported("triton", **known, dtype=jnp.float8_e4m3fn)


def test_what_mosaic_lacks_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 64}
    check_supported("mosaic", **known, dtype=jnp.bfloat16)
    check_supported("mosaic", **(known | {"head_dim": 80}), dtype=jnp.float32)  # by Triton's kernel
    with pytest.raises(NotImplementedError, match=r"page_size 20 .*use implementation='xla'"):
        check_supported("mosaic", **(known | {"page_size": 20}), dtype=jnp.bfloat16)
    monkeypatch.setattr(_triton, "capability", lambda: (8, 9))
    with pytest.raises(NotImplementedError, match=r"GPUs of compute capability 8\.9 \(it is for 9"):
        check_supported("mosaic", **known, dtype=jnp.bfloat16)


def test_platforms_choose_what_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_implementation("cpu") == "xla"
    assert choose_implementation("gpu") == "mosaic"
    monkeypatch.setattr(_triton, "capability", lambda: (8, 9))
    assert choose_implementation("gpu") == "triton"
