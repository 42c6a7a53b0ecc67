"""Rows rounded to 8 bits by the kernel, interpreted, against float64 and the plain computation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.kernels import (
    Gated,
    Normed,
    Rows,
    fp8_matmul,
    plain_rows,
    rounded_rows,
    w8a8_matmul,
)
from swiftjax.kernels import quantized_reference as reference
from swiftjax.kernels.quantized_reference import RoundedRows
from swiftjax.kernels.rounded_rows import choose_warps, round_rows, rows_by_kernel

EPS = 1e-5
KINDS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
SOURCES = ("plain", "normed", "gated", "scaled")  # the last: gated, its scales not applied yet
# Half a step of the codes: of the value, and of the scale where values are near zero.
STEPS = {"int8": (0.0, 0.5), "fp8": (2.0**-4, 2.0**-10)}
UNITS = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-11}
CASES = [
    ("plain", 1, "bfloat16"),
    ("plain", 577, "float16"),
    ("plain", 64, "float32"),
    ("normed", 577, "bfloat16"),
    ("normed", 64, "float16"),
    ("normed", 96, "float32"),
    ("gated", 1, "float32"),
    ("gated", 96, "float16"),
    ("gated", 577, "bfloat16"),
    ("scaled", 1, "float16"),
    ("scaled", 96, "float32"),
    ("scaled", 577, "bfloat16"),
]


def make_rows(source: str, width: int, dtype: str, num_rows: int = 5) -> Rows:
    """Rows of very different size; the third is all zeros."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((num_rows, width * (2 if source in ("gated", "scaled") else 1)))
    x *= np.exp2(rng.integers(-4, 5, (num_rows, 1)))
    x[2] = 0
    plain = jnp.asarray(x, dtype)
    if source == "gated":
        return Gated(plain)
    if source == "scaled":
        sizes = (rng.uniform(0.2, 1, size) for size in plain.shape)
        of_rows, of_columns = (jnp.asarray(size, jnp.float32) for size in sizes)
        return Gated(plain, (of_rows, of_columns))
    norm = jnp.asarray(rng.uniform(0.5, 2, width), dtype)
    return plain if source == "plain" else Normed(x=plain, scale=norm, eps=EPS)


def exact(rows: Rows) -> np.ndarray:
    """The rows in float64."""
    if isinstance(rows, Normed):
        x, norm = (np.asarray(a, np.float64) for a in (rows.x, rows.scale))
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + rows.eps) * norm
    if isinstance(rows, Gated):
        gate_up = np.asarray(rows.gate_up, np.float64)
        if rows.scales is not None:
            gate_up *= np.outer(*rows.scales)
        gate, up = np.split(gate_up, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up
    return np.asarray(rows, np.float64)


@jax.jit
def both_kinds(rows: Rows) -> dict[str, RoundedRows]:
    """By the kernel."""
    return {kind: rows_by_kernel(rows, dtype) for kind, dtype in KINDS.items()}


def check_rounded(rows: Rows) -> dict[str, RoundedRows]:
    """The codes are those of the nearest numbers, and the largest of a row has the largest code.

    Rounding to the rows' own type, which comes first, may move a value by a unit, and the peak.
    """
    wanted, unit, found = exact(rows), UNITS[rows.dtype.name], both_kinds(rows)
    smallest = float(jnp.finfo(rows.dtype).smallest_subnormal)
    some = np.abs(wanted).max(axis=1) > smallest / 2  # less is rounded to nothing
    for kind, (codes, scale) in found.items():
        assert codes.dtype == KINDS[kind] and scale.dtype == jnp.float32
        values, scales = np.asarray(codes).astype(np.float64), np.asarray(scale, np.float64)
        relative, absolute = STEPS[kind]
        allowed = (relative + 3 * unit) * np.abs(wanted) + absolute * 1.001 * scales[:, None]
        allowed += smallest  # a float16 of 1e-7 has no bits to spare
        assert (np.abs(values * scales[:, None] - wanted) <= allowed).all()
        largest = np.where(some, reference.largest_value(KINDS[kind]), 0)
        assert np.array_equal(np.abs(values).max(axis=1), largest)
    return found


@pytest.mark.parametrize(("source", "width", "dtype"), CASES)
def test_rows_become_the_nearest_codes(source: str, width: int, dtype: str) -> None:
    """And as the reference rounds them; but silu's roundings on the way are fewer."""
    rows = make_rows(source, width, dtype)
    found = check_rounded(rows)
    for kind, got in found.items() if source in ("plain", "normed") else ():
        wanted = reference.round_rows(plain_rows(rows), KINDS[kind])
        np.testing.assert_allclose(got.scale, wanted.scale, rtol=1e-6)
        codes = (np.asarray(x.codes).astype(np.float32) for x in (got, wanted))
        # A norm's sum in another order, or a scale's last bit, may move a code, rarely.
        assert np.not_equal(*codes).mean() <= 1e-2


@pytest.mark.parametrize("source", SOURCES)
def test_a_row_gives_the_same_bits_whatever_stands_beside_it(source: str) -> None:
    rows = make_rows(source, 64, "bfloat16")
    alone = jax.tree.map(lambda x: x[3:4] if len(x) == 5 else x, rows)
    for together, one in zip(both_kinds(rows).values(), both_kinds(alone).values(), strict=True):
        assert np.array_equal(together.codes[3:4], one.codes)
        assert np.array_equal(together.scale[3:4], one.scale)


@pytest.mark.parametrize("dtype", UNITS)
def test_scales_give_the_same_bits_in_the_kernel_and_before_it(dtype: str) -> None:
    late = make_rows("scaled", 577, dtype)
    assert isinstance(late, Gated) and late.scales is not None
    scaled = reference.apply_scales(late.gate_up, *late.scales, late.dtype)
    for kind, rows in both_kinds(late).items():
        wanted = both_kinds(Gated(scaled))[kind]
        assert np.array_equal(rows.codes, wanted.codes)
        assert np.array_equal(rows.scale, wanted.scale)


@pytest.mark.parametrize("source", SOURCES)
def test_tiny_and_huge_rows_give_finite_numbers(source: str) -> None:
    rows = make_rows(source, 64, "float32")
    for size in (1e-38, 1e-30, 1e18):
        factor = jnp.float32(size)
        sized = jax.tree.map(lambda x, by=factor: x * by if x.ndim == 2 else x, rows)
        for codes, scale in both_kinds(sized).values():
            assert np.isfinite(np.asarray(codes).astype(np.float32)).all()
            assert np.isfinite(scale).all() and (np.asarray(scale) > 0).all()


@pytest.mark.parametrize("num_rows", [5, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_products_take_rows_that_are_not_computed_yet(kind: str, num_rows: int) -> None:
    """Few tokens by kernels, many with XLA's product."""
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.integers(-100, 100, (24, 64)), KINDS[kind])
    scale = jnp.asarray(rng.uniform(0.5, 2, 24), jnp.float32)
    sources = [make_rows(source, 64, "bfloat16", num_rows) for source in SOURCES]
    matmul = fp8_matmul if kind == "fp8" else w8a8_matmul

    @jax.jit
    def products(sources: list[Rows]) -> list[list[jax.Array]]:
        names = ("triton", "xla")
        return [[matmul(x, weights, scale, implementation=i) for i in names] for x in sources]

    for products_of_one in products(sources):
        got, wanted = (np.asarray(y, np.float64) for y in products_of_one)
        error, size = (np.linalg.norm(y, axis=1) for y in (got - wanted, wanted))
        # Where a row's own type rounds otherwise some codes differ by a step.
        assert (error <= 5e-2 * size).all()


@pytest.mark.parametrize(
    ("implementation", "capability", "kinds"),
    [("xla", (9, 0), 0), ("triton", (8, 0), 1), ("triton", (8, 9), 2), ("mosaic", (9, 0), 2)],
)
def test_who_rounds(
    implementation: str,
    capability: tuple[int, int],
    kinds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPUs do without the kernel, and GPUs before 8.9 have none for fp8."""
    monkeypatch.setattr(rounded_rows._triton, "capability", lambda: capability)
    rows = make_rows("plain", 64, "bfloat16")

    def both(x: jax.Array) -> list[RoundedRows]:
        return [round_rows(x, kind, implementation=implementation) for kind in KINDS.values()]  # type: ignore[arg-type]

    assert str(jax.make_jaxpr(both)(rows)).count("pallas_call[") == kinds


def test_the_norm_of_a_row_alone_is_one_kernel() -> None:
    """Of several rows XLA makes one as well."""
    rows = make_rows("normed", 577, "bfloat16")
    assert isinstance(rows, Normed)
    alone = Normed(x=rows.x[3:4], scale=rows.scale, eps=rows.eps)
    for given, kernels in ((rows, 0), (alone, 1)):
        traced = jax.make_jaxpr(partial(plain_rows, implementation="triton"))(given)
        assert str(traced).count("pallas_call[") == kernels
    found, wanted = plain_rows(alone, "triton"), exact(alone)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2.0**-7)


def test_warps_depend_on_the_width() -> None:
    assert [choose_warps(width) for width in (1, 576, 4096, 14336, 28672)] == [1, 2, 8, 32, 32]
