"""Every kernel lowers for CUDA without a GPU: interpret mode accepts what Triton refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from swiftjax.kernels import (
    QuantizedPages,
    Streams,
    _triton,
    decode_attention,
    fp8_matmul,
    int4_matmul,
    int8_matmul,
    packed_int4,
    ragged_attention,
    rope_write,
    w8a8_matmul,
    write_kv,
)
from swiftjax.kernels.decode_attention import choose_decode_config
from swiftjax.kernels.ragged_attention import choose_ragged_config

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
MESH = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=H200)

# (KV heads, group, head_dim, page_size, dtype, window, whether sequences have their own)
MODELS = {
    "llama3-8b": (8, 4, 128, 64, jnp.bfloat16, 0, False),
    "page 16": (8, 4, 128, 16, jnp.bfloat16, 0, False),
    "page 128": (8, 4, 128, 128, jnp.bfloat16, 0, False),
    "smollm2": (3, 3, 64, 32, jnp.float16, 0, False),
    "float32": (2, 1, 64, 16, jnp.float32, 0, False),
    "head 80": (4, 8, 80, 64, jnp.bfloat16, 0, False),
    "head 96": (4, 16, 96, 64, jnp.float16, 0, False),
    "head 256": (1, 8, 256, 64, jnp.bfloat16, 0, False),
    "head 256 float32": (1, 8, 256, 128, jnp.float32, 0, False),
    "window": (8, 4, 128, 64, jnp.bfloat16, 4096, False),
    "sinks": (8, 5, 128, 16, jnp.bfloat16, 0, True),
    "sinks, page 64": (8, 4, 128, 64, jnp.bfloat16, 0, True),
}


@pytest.fixture(autouse=True)
def compile_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "is_interpreted", lambda: False)
    monkeypatch.setattr(_triton, "shared_memory_limit", lambda: 227 * 1024)


def cross_lower(f, *specs: jax.ShapeDtypeStruct) -> str:
    with use_abstract_mesh(MESH):
        return jax.jit(f).trace(*specs).lower(lowering_platforms=("cuda",)).as_text()


def spec(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("num_seqs", [1, 64])
@pytest.mark.parametrize("name", MODELS)
def test_decode_attention_lowers(name: str, num_seqs: int) -> None:
    heads, group, width, page, dtype, window, is_streaming = MODELS[name]
    q = spec(num_seqs, heads * group, width, dtype=dtype)
    pages = spec(100, heads, page, width, dtype=dtype)
    streams = [Streams(q, spec(num_seqs), spec(num_seqs))] if is_streaming else []

    def f(q, k, v, table, lens, streams=None):
        return decode_attention(
            q, k, v, table, lens, scale=0.1, window=window, streams=streams,
            implementation="triton",
        )  # fmt: skip

    text = cross_lower(f, q, pages, pages, spec(num_seqs, 128), spec(num_seqs), *streams)
    # One kernel, and a second that combines the splits when the sequences alone are too few.
    assert text.count("__gpu$xla.gpu.triton") == (1 if num_seqs * heads > 256 else 2)


@pytest.mark.parametrize("name", MODELS)
def test_ragged_attention_lowers(name: str) -> None:
    heads, group, width, page, dtype, window, is_streaming = MODELS[name]
    q = spec(512, heads * group, width, dtype=dtype)
    pages = spec(100, heads, page, width, dtype=dtype)
    streams = [Streams(q, spec(8), spec(8))] if is_streaming else []

    def f(q, k, v, table, starts, lens, streams=None):
        return ragged_attention(
            q, k, v, table, starts, lens, scale=0.1, window=window, streams=streams,
            implementation="triton",
        )  # fmt: skip

    text = cross_lower(f, q, pages, pages, spec(8, 128), spec(9), spec(8), *streams)
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("num_tokens", [1, 37, 512])
@pytest.mark.parametrize("name", MODELS)
def test_write_kv_lowers(name: str, num_tokens: int) -> None:
    heads, _, width, page, dtype, _, _ = MODELS[name]
    pages = spec(100, heads, page, width, dtype=dtype)
    tokens = spec(num_tokens, heads, width, dtype=dtype)

    def f(*arrays):
        return write_kv(*arrays, implementation="triton")

    text = cross_lower(f, pages, pages, tokens, tokens, spec(num_tokens))
    assert text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("num_tokens", [1, 37, 512])
@pytest.mark.parametrize("name", MODELS)
def test_rope_write_lowers(name: str, num_tokens: int) -> None:
    heads, group, width, page, dtype, _, _ = MODELS[name]
    pages = spec(100, heads, page, width, dtype=dtype)
    qkv = spec(num_tokens, heads * (group + 2) * width, dtype=dtype)
    angles = spec(num_tokens, width // 2, dtype=jnp.float32)
    norm = spec(width, dtype=dtype)

    def f(k, v, x, cos, sin, slots, q_norm, k_norm):
        out, k, v = rope_write(k, v, x, cos, sin, slots, implementation="triton")
        return rope_write(
            k, v, x, cos, sin, slots, q_norm=q_norm, k_norm=k_norm, eps=1e-5,
            implementation="triton",
        ), out  # fmt: skip

    text = cross_lower(f, pages, pages, qkv, angles, angles, spec(num_tokens), norm, norm)
    assert text.count("__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize("stored", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("name", ["llama3-8b", "smollm2", "head 80", "sinks"])
def test_everything_lowers_for_pages_in_8_bits(name: str, stored) -> None:
    heads, group, width, page, dtype, _, is_streaming = MODELS[name]
    pages = QuantizedPages(
        spec(100, heads, page, width, dtype=stored), spec(100, heads, page, dtype=jnp.float32)
    )
    q, tokens = (spec(256, n, width, dtype=dtype) for n in (heads * group, heads))
    qkv = spec(256, heads * (group + 2) * width, dtype=dtype)
    angles = spec(256, width // 2, dtype=jnp.float32)
    streams = [Streams(q, spec(256), spec(256))] if is_streaming else []

    def f(q, k, v, x, cos, sin, new, slots, table, starts, lens, streams=None):
        options = {"scale": 0.1, "streams": streams, "implementation": "triton"}
        _, k, v = rope_write(k, v, x, cos, sin, slots, implementation="triton")
        k, v = write_kv(k, v, new, new, slots, implementation="triton")
        return (
            decode_attention(q, k, v, table, lens, **options),
            ragged_attention(q, k, v, table, starts, lens, **options),
        )

    rows = [spec(256), spec(256, 8), spec(257), spec(256)]
    text = cross_lower(f, q, pages, pages, qkv, angles, angles, tokens, *rows, *streams)
    assert text.count("__gpu$xla.gpu.triton") == 4


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "outputs", "inputs"),
    [(1, jnp.bfloat16, 28672, 4096), (64, jnp.float16, 4096, 14336), (8, jnp.bfloat16, 960, 576)],
)
def test_quantized_matmuls_lower(num_tokens: int, dtype, outputs: int, inputs: int) -> None:
    """Large matrices, one with a split sum, and one whose inputs are no multiple of 128."""
    x = spec(num_tokens, inputs, dtype=dtype)
    per_output = spec(outputs, dtype=jnp.float32)
    for matmul, stored in (
        (int8_matmul, jnp.int8),
        (w8a8_matmul, jnp.int8),
        (fp8_matmul, jnp.float8_e4m3fn),
    ):
        f = partial(matmul, implementation="triton")
        text = cross_lower(f, x, spec(outputs, inputs, dtype=stored), per_output)
        assert text.count("__gpu$xla.gpu.triton") == 1
    for group_size in (32, 64, 128):
        groups = (-(-inputs // group_size), outputs)
        f = partial(int4_matmul, implementation="triton", group_size=group_size)
        words = spec(outputs, packed_int4.words_per_row(inputs))
        scale, zero = spec(*groups, dtype=jnp.float32), spec(*groups, dtype=jnp.uint8)
        assert cross_lower(f, x, words, scale, zero).count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("limit", _triton.SHARED_MEMORY.values())
@pytest.mark.parametrize("name", MODELS)
def test_chosen_tiles_fit_into_shared_memory(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, group, width, page, dtype, _, _ = MODELS[name]
    monkeypatch.setattr(_triton, "shared_memory_limit", lambda: limit)
    size = {"width": _triton.power_of_two(width), "itemsize": jnp.dtype(dtype).itemsize}
    decode = choose_decode_config(
        num_seqs=4, num_kv_heads=heads, max_context=8192, page_size=page, **size
    )
    tile = _triton.TileSize(16, decode.block_k, decode.launch.num_stages)
    assert _triton.shared_memory(tile, **size) <= limit
    for num_tokens in (64, 8192):
        ragged = choose_ragged_config(num_tokens=num_tokens, num_seqs=4, group=group, **size)
        tile = _triton.TileSize(ragged.rows, ragged.block_k, ragged.launch.num_stages)
        assert ragged.rows >= group and _triton.shared_memory(tile, **size) <= limit
