"""Pages in 8 bits: what is stored, and that every op reads it back as value times scale."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.kernels import (
    Implementation,
    QuantizedPages,
    Streams,
    rope_write,
    write_kv,
)
from tests.kernels.attention_case import AttentionCase, make_case, relative_error
from tests.kernels.shapes import DECODES, RAGGED, WHOLE
from tests.kernels.test_attention import TOLERANCE, run_decode, run_ragged
from tests.kernels.test_rope_write import make_case as make_rope_case

STORED = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
# How far a product of random numbers is from the one with rounded keys and values.
ROUNDING = {"int8": 0.012, "fp8": 0.05}


def plain_heads(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of heads, by numpy."""
    dtype, largest = STORED[kind]
    x = x.astype(np.float32)
    with np.errstate(invalid="ignore"):
        scales = np.maximum(np.abs(x).max(axis=-1) / np.float32(largest), np.float32(2.0**-126))
        values = np.clip(x / scales[..., None], -largest, largest)
        values = np.rint(values) if kind == "int8" else values
        return values.astype(dtype), scales


def quantized_case(case: AttentionCase, kind: str) -> tuple[AttentionCase, AttentionCase]:
    """The same problem on pages in 8 bits, and on plain pages of the numbers that these stand for.

    Slots that nobody may see hold NaN as scales.
    """
    packed, plain = [], []
    for pages in (case.k_pages, case.v_pages):
        values, scales = plain_heads(np.asarray(pages), kind)
        packed.append(QuantizedPages(jnp.asarray(values), jnp.asarray(scales)))
        plain.append(jnp.asarray(values.astype(np.float32) * scales[..., None]))
    wide = replace(case, k_pages=plain[0], v_pages=plain[1], q=case.q.astype(jnp.float32))
    streams = case.options["streams"]
    if isinstance(streams, Streams):
        streams = streams._replace(q_sink=streams.q_sink.astype(jnp.float32))
        wide = replace(wide, options=case.options | {"streams": streams})
    return replace(case, k_pages=packed[0], v_pages=packed[1]), wide


@pytest.mark.parametrize("implementation", WHOLE)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lengths", "int8"),
        ("head 80", "fp8"),
        ("sinks", "int8"),
        ("bfloat16", "fp8"),
        ("float16", "int8"),
    ],
)
def test_decode_reads_values_times_scales(
    name: str, kind: str, implementation: Implementation
) -> None:
    case = make_case(DECODES[name])
    packed, plain = quantized_case(case, kind)
    out = run_decode(packed, implementation)
    assert out.dtype == case.q.dtype
    assert (
        relative_error(out, np.asarray(run_decode(plain, "reference")))
        <= TOLERANCE[DECODES[name].dtype]
    )
    assert relative_error(out, case.expected) <= ROUNDING[kind]


@pytest.mark.parametrize("implementation", WHOLE)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("mixed", "int8"), ("sinks", "fp8"), ("page 128", "int8"), ("bfloat16", "int8")],
)
def test_ragged_reads_values_times_scales(
    name: str, kind: str, implementation: Implementation
) -> None:
    case = make_case(RAGGED[name])
    packed, plain = quantized_case(case, kind)
    out = run_ragged(packed, implementation)
    assert (
        relative_error(out, np.asarray(run_ragged(plain, "reference")))
        <= TOLERANCE[RAGGED[name].dtype]
    )
    assert relative_error(out, case.expected) <= ROUNDING[kind]


def empty_pages(kind: str, num_kv_heads: int, head_dim: int) -> QuantizedPages:
    """Nine pages of 16, with marks in every slot."""
    pool = (9, num_kv_heads, 16, head_dim)
    values = jnp.full(pool, 3, STORED[kind][0])
    return QuantizedPages(values, jnp.full(pool[:3], 5, jnp.float32))


def check_pages(pages: QuantizedPages, heads: np.ndarray, slots: np.ndarray, kind: str) -> None:
    """Exactly the named slots hold these heads [T K H]."""
    values, scales = plain_heads(heads, kind)
    got_values, got_scales = np.asarray(pages.values), np.asarray(pages.scales)
    left = np.ones((9, 16), bool)
    for token, slot in enumerate(slots):
        if slot < 144:
            at = divmod(int(slot), 16)
            left[at] = False
            np.testing.assert_allclose(got_scales[at[0], :, at[1]], scales[token], rtol=1e-6)
            got = got_values[at[0], :, at[1]].astype(np.float32)
            steps = np.abs(got - values[token].astype(np.float32))
            # A quotient beside a tie may fall to either side.
            assert (steps > 0).mean() < 0.01 and steps.max() <= (1 if kind == "int8" else 32)
    page, offset = np.nonzero(left)
    assert (got_values[page, :, offset].astype(np.float32) == 3).all()
    assert (got_scales[page, :, offset] == 5).all()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("kind", STORED)
def test_write_kv_stores_what_numpy_finds(kind: str, implementation: Implementation) -> None:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((40, 3, 80)).astype(np.float32) for _ in "kv")
    k[0], v[1] = 0, v[1] * 1e4  # heads without anything, and large ones
    slots = rng.permutation(144)[:40]
    slots[5] = 144
    pages = empty_pages(kind, 3, 80)
    out = write_kv(
        pages, pages, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots, jnp.int32),
        implementation=implementation,
    )  # fmt: skip
    for written, heads in zip(out, (k, v), strict=True):
        assert isinstance(written, QuantizedPages)
        check_pages(written, heads, slots, kind)


def check_rope_write(heads: str, kind: str) -> None:
    """The kernel stores in pages of 8 bits what the reference does."""
    case: dict[str, Any] = make_rope_case(heads, "mixed", "bfloat16")
    _, kv_heads, _, width = case["k_pages"].shape
    case["k_pages"] = case["v_pages"] = empty_pages(kind, kv_heads, width)
    wanted = rope_write(**case, implementation="reference")
    got = rope_write(**case, implementation="triton")
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        one, other = (np.asarray(x).astype(np.float32) for x in (one, other))
        # Sums in another order may move a value by one unit in the last place, rarely.
        assert (one != other).mean() < 1e-2
        np.testing.assert_allclose(one, other, rtol=0.13, atol=1)


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("heads", ["group 3", "width 80"])
def test_rope_write_stores_what_the_reference_does(heads: str, kind: str) -> None:
    check_rope_write(heads, kind)


def test_what_is_written_is_read_back() -> None:
    """Written by one kernel, read by another: a whole context in int8 beside one in float32."""
    case = make_case(DECODES["lengths"])
    kv_heads, width = case.k_pages.shape[1], case.k_pages.shape[3]
    slots = jnp.arange(case.k_pages.shape[0] * case.k_pages.shape[2], dtype=jnp.int32)

    def tokens(pages: jax.Array) -> jax.Array:
        return jnp.nan_to_num(pages.transpose(0, 2, 1, 3).reshape(-1, kv_heads, width))

    shape = case.k_pages.shape
    empty = QuantizedPages(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:3], jnp.float32))
    k, v = write_kv(
        empty, empty, tokens(case.k_pages), tokens(case.v_pages), slots, implementation="reference"
    )
    out = run_decode(replace(case, k_pages=k, v_pages=v), "xla")
    assert relative_error(out, case.expected) <= ROUNDING["int8"]
