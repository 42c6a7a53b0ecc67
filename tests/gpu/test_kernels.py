"""The Triton kernels on a real GPU: right, the same from run to run, in place, in large pools."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.kernels import (
    _triton,
    decode_attention,
    ragged_attention,
    write_kv,
)
from tests.kernels.attention_case import Shape, make_case, relative_error
from tests.kernels.shapes import DECODES, PROMPTS, RAGGED
from tests.kernels.test_attention import run_decode, run_ragged
from tests.kernels.test_chunk_attention import SHAPES as CHUNK_SHAPES
from tests.kernels.test_chunk_attention import attend as attend_chunks
from tests.kernels.test_prompt_attention import attend
from tests.kernels.test_quantized_pages import STORED, check_rope_write, quantized_case
from tests.kernels.test_rope_write import HEADS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an NVIDIA GPU"),
]

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
CHUNKS = CHUNK_SHAPES | {
    "long": Shape(
        sequences=((700, 1000), (5, 1), (0, 300)), num_kv_heads=2, group=4, head_dim=128,
        page_size=64, padding=99, dtype="bfloat16",
    ),
    "narrow": Shape(
        sequences=((40, 1), (70, 132), (3, 65), (9, 20)), num_kv_heads=1, group=1, head_dim=64,
        page_size=16, padding=6, dtype="bfloat16",
    ),
    "wide window": Shape(
        sequences=((250, 128), (300, 500)), num_kv_heads=2, group=2, head_dim=128, window=100,
        page_size=32, padding=12, dtype="bfloat16",
    ),
}  # fmt: skip
SUPPORTED = {name: shape for name, shape in DECODES.items() if shape.head_dim >= 16}


def decode(*arrays: jax.Array, **options: object) -> jax.Array:
    return jax.jit(lambda *a: decode_attention(*a, **options, implementation="triton"))(*arrays)


def ragged(*arrays: jax.Array, **options: object) -> jax.Array:
    return jax.jit(lambda *a: ragged_attention(*a, **options, implementation="triton"))(*arrays)


@pytest.mark.parametrize("name", SUPPORTED)
def test_decode_equals_dense(name: str) -> None:
    case = make_case(SUPPORTED[name])
    arrays = (case.q, case.k_pages, case.v_pages, case.page_table, case.context_lens)
    out = decode(*arrays, **case.options)
    assert relative_error(out, case.expected) <= TOLERANCE[SUPPORTED[name].dtype]
    np.testing.assert_array_equal(out, decode(*arrays, **case.options))


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_equals_dense(name: str) -> None:
    case = make_case(RAGGED[name])
    arrays = (
        case.q,
        case.k_pages,
        case.v_pages,
        case.page_table,
        case.query_starts,
        case.context_lens,
    )
    out = ragged(*arrays, **case.options)
    assert relative_error(out, case.expected) <= TOLERANCE[RAGGED[name].dtype]
    np.testing.assert_array_equal(out, ragged(*arrays, **case.options))


@pytest.mark.parametrize("name", PROMPTS)
def test_whole_prompts_by_cudnn_equal_dense(name: str) -> None:
    case = make_case(PROMPTS[name])
    out = attend(case, "triton")
    assert relative_error(out, case.expected) <= TOLERANCE[PROMPTS[name].dtype]
    assert not np.asarray(out[int(case.query_starts[-1]) :], np.float32).any()
    np.testing.assert_array_equal(out, attend(case, "triton"))


@pytest.mark.skipif(_triton.capability() != _triton.HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_on_hopper_equal_dense(name: str) -> None:
    case = make_case(CHUNKS[name])
    out = attend_chunks(case)
    assert relative_error(out, case.expected) <= TOLERANCE[CHUNKS[name].dtype]
    np.testing.assert_array_equal(out, attend_chunks(case))


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("name", SUPPORTED)
def test_decode_reads_pages_in_8_bits(name: str, kind: str) -> None:
    packed, plain = quantized_case(make_case(SUPPORTED[name]), kind)
    wanted = np.asarray(run_decode(plain, "reference"))
    out = run_decode(packed, "triton")
    assert relative_error(out, wanted) <= TOLERANCE[SUPPORTED[name].dtype]


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_reads_pages_in_8_bits(name: str, kind: str) -> None:
    packed, plain = quantized_case(make_case(RAGGED[name]), kind)
    wanted = np.asarray(run_ragged(plain, "reference"))
    out = run_ragged(packed, "triton")
    assert relative_error(out, wanted) <= TOLERANCE[RAGGED[name].dtype]


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("heads", HEADS)
def test_rope_write_stores_8_bits_as_the_reference_does(heads: str, kind: str) -> None:
    check_rope_write(heads, kind)


@pytest.mark.parametrize("gibibytes", [2.5, 5.0])
def test_large_pools_are_written_in_place_and_addressed_correctly(gibibytes: float) -> None:
    """Keys beyond 2^31 bytes, and beyond 2^31 elements, are the ones that were written there."""
    small = make_case(
        Shape(
            sequences=((511, 1), (400, 1)),
            num_kv_heads=8,
            group=4,
            head_dim=128,
            page_size=64,
            dtype="bfloat16",
        )
    )
    num_pages = int(gibibytes * 2**30) // (8 * 64 * 128 * 2)
    columns = small.page_table.shape[1]
    ids = np.array([num_pages - 1, 0, num_pages // 2, *range(num_pages - 9, num_pages - 1)])
    table = np.stack([ids[:columns], num_pages // 3 + np.arange(columns)]).astype(np.int32)
    shape = (num_pages, 8, 64, 128)
    k, v = (jax.jit(lambda: jnp.zeros(shape, jnp.bfloat16))() for _ in "kv")
    slots = (table[:, :, None] * 64 + np.arange(64)).reshape(-1).astype(np.int32)
    # The small problem's pages, and nothing where its table only has padding.
    source = np.asarray(small.page_table).reshape(-1)
    slots = np.where(source[:, None] == 0, num_pages * 64, slots.reshape(-1, 64)).reshape(-1)

    def tokens(pages: jax.Array) -> jax.Array:
        return pages[source].transpose(0, 2, 1, 3).reshape(-1, 8, 128)

    write = jax.jit(lambda *a: write_kv(*a, implementation="triton"), donate_argnums=(0, 1))
    arrays = (k, v, tokens(small.k_pages), tokens(small.v_pages))
    compiled = write.lower(*arrays, jnp.asarray(slots)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
    k, v = compiled(*arrays, jnp.asarray(slots))
    lens = small.context_lens
    out = decode(small.q, k, v, jnp.asarray(table), lens, **small.options)
    assert relative_error(out, small.expected) <= TOLERANCE["bfloat16"]
    starts = jnp.arange(3, dtype=jnp.int32)
    out = ragged(small.q, k, v, jnp.asarray(table), starts, lens, **small.options)
    assert relative_error(out, small.expected) <= TOLERANCE["bfloat16"]
