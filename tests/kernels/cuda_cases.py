"""What is lowered and compiled for CUDA on machines without a GPU: functions and their shapes.

A case is a function of arrays and the shapes to call it with. `test_cuda_lowering.py` lowers them;
`test_compiled.py` compiles some of them for three architectures, in a process of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from swiftjax.kernels import (
    Gated,
    Implementation,
    Normed,
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
from swiftjax.kernels.dense_matmul import dense_matmul
from swiftjax.kernels.hopper_matmul import hopper_int4
from swiftjax.kernels.ragged_attention import choose_ragged_config
from swiftjax.kernels.rounded_rows import MOST_SCALED, rows_by_kernel


class Case(NamedTuple):
    """A function and the shapes of its arguments."""

    run: Callable[..., Any]
    specs: tuple[Any, ...]


class Model(NamedTuple):
    """A model's numbers, as kernels see them."""

    heads: int  # KV heads
    group: int
    width: int
    page: int
    dtype: Any
    window: int = 0
    is_streaming: bool = False  # sequences have windows and sinks of their own


MODELS = {
    "llama3-8b": Model(8, 4, 128, 64, jnp.bfloat16),
    "page 16": Model(8, 4, 128, 16, jnp.bfloat16),
    "page 128": Model(8, 4, 128, 128, jnp.bfloat16),
    "smollm2": Model(3, 3, 64, 32, jnp.float16),
    "float32": Model(2, 1, 64, 16, jnp.float32),
    "head 80": Model(4, 8, 80, 64, jnp.bfloat16),
    "head 96": Model(4, 16, 96, 64, jnp.float16),
    "head 256": Model(1, 8, 256, 64, jnp.bfloat16),
    "head 256 float32": Model(1, 8, 256, 128, jnp.float32),
    "window": Model(8, 4, 128, 64, jnp.bfloat16, window=4096),
    "sinks": Model(8, 5, 128, 16, jnp.bfloat16, is_streaming=True),
    "sinks, page 64": Model(8, 4, 128, 64, jnp.bfloat16, is_streaming=True),
    "sinks, head 256": Model(1, 8, 256, 64, jnp.bfloat16, is_streaming=True),
}
STORED = {"plain": None, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


def spec(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """The shape of one array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def pages_of(m: Model, stored: str = "plain") -> Any:
    """A pool of 100 pages."""
    if stored == "plain":
        return spec(100, m.heads, m.page, m.width, dtype=m.dtype)
    values = spec(100, m.heads, m.page, m.width, dtype=STORED[stored])
    return QuantizedPages(values, spec(100, m.heads, m.page, dtype=jnp.float32))


def _streams_of(m: Model, q: Any, num_seqs: int) -> list[Streams]:
    return [Streams(q, spec(num_seqs), spec(num_seqs))] if m.is_streaming else []


def decode_case(m: Model, *, num_seqs: int, stored: str = "plain") -> Case:
    """One new token for each sequence, contexts of up to 128 pages."""
    q, pages = spec(num_seqs, m.heads * m.group, m.width, dtype=m.dtype), pages_of(m, stored)

    def run(q, k, v, table, lens, streams=None):
        return decode_attention(
            q, k, v, table, lens, scale=0.1, window=m.window, streams=streams,
            implementation="triton",
        )  # fmt: skip

    rows = (spec(num_seqs, 128), spec(num_seqs))
    return Case(run, (q, pages, pages, *rows, *_streams_of(m, q, num_seqs)))


def ragged_case(
    m: Model,
    *,
    num_tokens: int,
    num_seqs: int,
    stored: str = "plain",
    implementation: Implementation = "triton",
) -> Case:
    """A mixed batch, or with one sequence a prompt."""
    q, pages = spec(num_tokens, m.heads * m.group, m.width, dtype=m.dtype), pages_of(m, stored)

    def run(q, k, v, table, starts, lens, streams=None):
        return ragged_attention(
            q, k, v, table, starts, lens, scale=0.1, window=m.window, streams=streams,
            implementation=implementation,
        )  # fmt: skip

    rows = (spec(num_seqs, 128), spec(num_seqs + 1), spec(num_seqs))
    return Case(run, (q, pages, pages, *rows, *_streams_of(m, q, num_seqs)))


def decode_estimate(m: Model, *, num_seqs: int) -> int:
    """Shared memory of `decode_case`, as the kernel's own choice of tiles estimates it."""
    rotations, numbers = 1 + m.is_streaming, _widths(m)
    config = choose_decode_config(
        num_seqs=num_seqs, num_kv_heads=m.heads, max_context=128 * m.page, page_size=m.page,
        rotations=rotations, **numbers,
    )  # fmt: skip
    size = _triton.TileSize(16 * rotations, config.block_k, config.launch.num_stages)
    return _triton.shared_memory(size, **numbers)


def ragged_estimate(m: Model, *, num_tokens: int, num_seqs: int) -> int:
    """The same of `ragged_case`."""
    rotations, numbers = 1 + m.is_streaming, _widths(m)
    group = _triton.power_of_two(m.group)
    config = choose_ragged_config(
        num_tokens=num_tokens, num_seqs=num_seqs, group=group, rotations=rotations, **numbers
    )
    assert config.rows >= group
    size = _triton.TileSize(config.rows * rotations, config.block_k, config.launch.num_stages)
    return _triton.shared_memory(size, **numbers)


def _widths(m: Model) -> dict[str, int]:
    return {"width": _triton.power_of_two(m.width), "itemsize": jnp.dtype(m.dtype).itemsize}


def write_case(m: Model, *, num_tokens: int, stored: str = "plain") -> Case:
    """New keys and values into their pages."""
    pages, tokens = pages_of(m, stored), spec(num_tokens, m.heads, m.width, dtype=m.dtype)
    run = partial(write_kv, implementation="triton")
    return Case(run, (pages, pages, tokens, tokens, spec(num_tokens)))


def rope_case(m: Model, *, num_tokens: int, has_norm: bool = False, stored: str = "plain") -> Case:
    """The same after their rotation, and after a norm of each head where models have it."""
    pages, norm = pages_of(m, stored), spec(m.width, dtype=m.dtype)
    qkv = spec(num_tokens, m.heads * (m.group + 2) * m.width, dtype=m.dtype)
    angles = spec(num_tokens, m.width // 2, dtype=jnp.float32)

    def run(k, v, x, cos, sin, slots, q_norm=None, k_norm=None):
        return rope_write(
            k, v, x, cos, sin, slots, q_norm=q_norm, k_norm=k_norm, eps=1e-5,
            implementation="triton",
        )  # fmt: skip

    norms = (norm, norm) if has_norm else ()
    return Case(run, (pages, pages, qkv, angles, angles, spec(num_tokens), *norms))


def matmul_case(
    kind: str,
    *,
    num_tokens: int,
    outputs: int,
    inputs: int,
    dtype: Any,
    on_hopper: bool = False,
) -> Case:
    """A product with quantised weights: int8, w8a8, fp8, or int4 and the size of its groups."""
    x, per_output = spec(num_tokens, inputs, dtype=dtype), spec(outputs, dtype=jnp.float32)
    if kind.startswith("int4"):
        group_size = int(kind.removeprefix("int4/"))
        groups = (-(-inputs // group_size), outputs)
        words = spec(outputs, packed_int4.words_per_row(inputs))
        scales = (spec(*groups, dtype=jnp.float32), spec(*groups, dtype=jnp.uint8))
        matmul = hopper_int4 if on_hopper else partial(int4_matmul, implementation="triton")
        run = partial(matmul, group_size=group_size)
        return Case(run, (x, words, *scales))
    matmul = {"int8": int8_matmul, "w8a8": w8a8_matmul, "fp8": fp8_matmul}[kind]
    stored = jnp.float8_e4m3fn if kind == "fp8" else jnp.int8
    run = partial(matmul, implementation="triton")
    return Case(run, (x, spec(outputs, inputs, dtype=stored), per_output))


def dense_case(stored: str, num_tokens: int, shape: tuple[int, int], following: str) -> Case:
    """A product of many tokens by Mosaic's kernel: inputs and outputs, and what follows."""
    (inputs, outputs), dtype = shape, jnp.dtype(stored)
    is_narrow, is_gated = dtype.itemsize == 1, following == "gated"
    kernel = spec(*((outputs, inputs) if is_narrow else (inputs, outputs)), dtype=dtype)
    scales = [spec(size, dtype=jnp.float32) for size in (num_tokens, outputs)]
    residual = spec(num_tokens, outputs, dtype=jnp.bfloat16)

    def run(x, kernel, *rest):
        given, options = list(rest), {"gated": is_gated, "outputs_first": is_narrow}
        scales = (given.pop(0), given.pop(0)) if is_narrow else None
        residual = given.pop() if given else None
        return dense_matmul(x, kernel, residual=residual, scales=scales, **options)

    rest = (scales if is_narrow else []) + ([residual] if following == "residual" else [])
    return Case(run, (spec(num_tokens, inputs, dtype=dtype), kernel, *rest))


def rows_case(kind: str, *, num_tokens: int, hidden: int, mlp: int, dtype: Any) -> Case:
    """Rounding of all that a layer multiplies: int8 or fp8, whose gates may be scaled too."""
    x, gate_up = (spec(num_tokens, width, dtype=dtype) for width in (hidden, 2 * mlp))
    scales = tuple(spec(size, dtype=jnp.float32) for size in (num_tokens, 2 * mlp))
    stored = STORED[kind]

    def run(x, norm, gate_up, scales):
        rows = [x, Normed(x=x, scale=norm, eps=1e-5), Gated(gate_up)]
        if kind == "fp8" and mlp <= MOST_SCALED:
            rows.append(Gated(gate_up, scales))
        return [rows_by_kernel(one, stored) for one in rows]

    return Case(run, (x, spec(hidden, dtype=dtype), gate_up, scales))


def together(*cases: Case) -> Case:
    """Several cases as one program: its kernels are compiled side by side."""

    def run(*arguments):
        return [case.run(*specs) for case, specs in zip(cases, arguments, strict=True)]

    return Case(run, tuple(case.specs for case in cases))
