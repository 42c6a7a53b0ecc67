"""Every kernel lowers for CUDA without a GPU: interpret mode accepts what Triton refuses."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from benchmarks.deviceless import as_on
from benchmarks.gpu_targets import TARGETS
from swiftjax.kernels import _fp8_product, _triton
from swiftjax.kernels.rounded_rows import MOST_SCALED
from tests.kernels.cuda_cases import (
    MODELS,
    Case,
    decode_case,
    decode_estimate,
    matmul_case,
    ragged_case,
    ragged_estimate,
    rope_case,
    rows_case,
    together,
    write_case,
)


@pytest.fixture(autouse=True)
def compile_for_cuda() -> Iterator[None]:
    with as_on(TARGETS["h200"]):
        yield


def cross_lower(case: Case) -> str:
    traced = jax.jit(case.run).trace(*case.specs)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def one_of_each(*fields: str) -> list[str]:
    """Names of models that differ in these numbers: the others give the same kernel again."""
    of_each = {tuple(getattr(m, x) for x in fields): name for name, m in MODELS.items()}
    return list(of_each.values())


def num_kernels(case: Case) -> int:
    return cross_lower(case).count("__gpu$xla.gpu.triton")


@pytest.mark.parametrize("num_seqs", [1, 64])
@pytest.mark.parametrize("name", MODELS)
def test_decode_attention_lowers(name: str, num_seqs: int) -> None:
    model = MODELS[name]
    # One kernel, and a second that combines the splits when the sequences alone are too few.
    wanted = 1 if num_seqs * model.heads > 256 else 2
    assert num_kernels(decode_case(model, num_seqs=num_seqs)) == wanted


@pytest.mark.parametrize("name", MODELS)
def test_ragged_attention_lowers(name: str) -> None:
    text = cross_lower(ragged_case(MODELS[name], num_tokens=512, num_seqs=8))
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("num_tokens", [1, 512])  # a program of one token, and of 16
@pytest.mark.parametrize("name", one_of_each("heads", "page", "width", "dtype"))
def test_write_kv_lowers(name: str, num_tokens: int) -> None:
    assert num_kernels(write_case(MODELS[name], num_tokens=num_tokens)) == 1


@pytest.mark.parametrize("num_tokens", [1, 37, 512])
@pytest.mark.parametrize("name", one_of_each("heads", "group", "page", "width", "dtype"))
def test_rope_write_lowers(name: str, num_tokens: int) -> None:
    for has_norm in (False, True):
        case = rope_case(MODELS[name], num_tokens=num_tokens, has_norm=has_norm)
        assert num_kernels(case) == 1


@pytest.mark.parametrize("stored", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["llama3-8b", "smollm2", "head 80", "sinks"])
def test_everything_lowers_for_pages_in_8_bits(name: str, stored: str) -> None:
    model = MODELS[name]._replace(window=0)
    everything = together(
        rope_case(model, num_tokens=256, stored=stored),
        write_case(model, num_tokens=256, stored=stored),
        decode_case(model, num_seqs=256, stored=stored),
        ragged_case(model, num_tokens=256, num_seqs=256, stored=stored),
    )
    assert num_kernels(everything) == 4


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "outputs", "inputs"),
    [(1, jnp.bfloat16, 28672, 4096), (64, jnp.float16, 4096, 14336), (8, jnp.bfloat16, 960, 576)],
)
def test_quantized_matmuls_lower(num_tokens: int, dtype, outputs: int, inputs: int) -> None:
    """Large matrices, one with a split sum, and one whose inputs are no multiple of 128."""
    shape = {"num_tokens": num_tokens, "outputs": outputs, "inputs": inputs, "dtype": dtype}
    for kind in ("int8", "w8a8", "fp8", "int4/32", "int4/64", "int4/128"):
        rounds = kind in ("w8a8", "fp8")
        assert num_kernels(matmul_case(kind, **shape)) == 1 + rounds


def test_fp8_products_lower_to_hoppers_own() -> None:
    """Through a part of jax that is not public: a version without it is seen here."""
    case = matmul_case("fp8", num_tokens=64, outputs=256, inputs=256, dtype=jnp.bfloat16)
    assert num_kernels(case) == 2
    assert _fp8_product._primitive.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("dtype", "hidden", "mlp"),
    [(jnp.bfloat16, 4096, 14336), (jnp.float16, 576, 1536), (jnp.float32, 77, 28672)],
)
def test_rounding_of_rows_lowers(dtype, hidden: int, mlp: int) -> None:
    for kind in ("int8", "fp8"):
        case = rows_case(kind, num_tokens=8, hidden=hidden, mlp=mlp, dtype=dtype)
        assert num_kernels(case) == (4 if kind == "fp8" and mlp <= MOST_SCALED else 3)


@pytest.mark.parametrize("capability", _triton.SHARED_MEMORY)
@pytest.mark.parametrize("name", MODELS)
def test_chosen_tiles_fit_into_shared_memory(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, limit = MODELS[name], _triton.SHARED_MEMORY[capability]
    monkeypatch.setattr(_triton, "capability", lambda: capability)
    for num_tokens, num_seqs in ((512, 8), (8192, 1)):
        assert ragged_estimate(model, num_tokens=num_tokens, num_seqs=num_seqs) <= limit
    assert decode_estimate(model, num_seqs=4) <= limit


def test_fp8_products_are_left_to_xla_where_the_gpu_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_triton, "capability", lambda: (8, 0))
    shape = {"num_tokens": 8, "outputs": 256, "inputs": 256, "dtype": jnp.bfloat16}
    assert num_kernels(matmul_case("fp8", **shape)) == 0
