"""Rotary embedding: published frequency tables, exact angles at long positions, rotation laws."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftjax.hf_rope import read_rope
from swiftjax.kernels.reference import rotate
from swiftjax.model.rope import (
    attention_factor,
    dynamic_rope_angles,
    inverse_frequencies,
    make_rope_table,
    rope_angles,
)
from swiftjax.model_config import ROPE_KINDS, RopeConfig, RopeKind

LLAMA3_TINY = RopeConfig(kind="llama3", theta=1e4, factor=8.0, original_max_position=64)
LLAMA32 = RopeConfig(kind="llama3", theta=5e5, factor=32.0, original_max_position=8192)
YARN_TINY = RopeConfig(kind="yarn", theta=1e6, factor=8.0, original_max_position=128)
YARN = RopeConfig(kind="yarn", theta=1e4, factor=8.0, original_max_position=4096)
LINEAR = RopeConfig(kind="linear", theta=1e4, factor=3.0)
DYNAMIC = RopeConfig(kind="dynamic", theta=1e4, factor=3.0, original_max_position=100)
ALL_KINDS = [RopeConfig(theta=5e5), LINEAR, DYNAMIC, LLAMA32, YARN]

LLAMA3_TINY_ROW = [1, 2.443845994e-1, 1.304225604e-2, 3.952847075e-3,
                   1.25e-3, 3.952847075e-4, 1.25e-4, 3.952847075e-5]  # fmt: skip
LLAMA32_PAIRS = {0: 1.0, 1: 6.636012e-1, 7: 5.666962e-2, 14: 3.211445995e-3, 15: 1.290547928e-3,
                 16: 4.295567966e-4, 17: 9.708287803e-5, 18: 1.946163818e-5, 24: 1.661967e-6,
                 31: 9.418306725e-8}  # fmt: skip
YARN_TINY_ROW = [1, 1.000282e-1, 3.952847e-3, 7.029267e-4,
                 1.25e-4, 2.222849e-5, 3.952847e-6, 7.029267e-7]  # fmt: skip
YARN_PAIRS = {10: 5.623413e-2, 11: 3.933130849e-2, 12: 2.736586437e-2, 17: 3.965786684e-3,
              22: 3.419768096e-4, 23: 1.666901790e-4, 31: 1.666901790e-5}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "head_dim", "pairs"),
    [
        (LLAMA3_TINY, 16, dict(enumerate(LLAMA3_TINY_ROW))),
        (LLAMA32, 64, LLAMA32_PAIRS),
        (YARN_TINY, 16, dict(enumerate(YARN_TINY_ROW))),
        (YARN, 64, YARN_PAIRS),
        (LINEAR, 8, {0: 3.333333e-1, 1: 3.333333e-2, 2: 3.333333e-3, 3: 3.333333e-4}),
    ],
    ids=["llama3-tiny", "llama3.2", "yarn-tiny", "yarn", "linear"],
)
def test_frequencies_equal_the_published_rows(rope, head_dim, pairs) -> None:
    got = inverse_frequencies(rope, head_dim)
    assert got.dtype == np.float64 and got.shape == (head_dim // 2,)
    np.testing.assert_allclose(got[list(pairs)], list(pairs.values()), rtol=1e-6)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("size", ["llama3.2", "tiny"])
def test_b022_llama3_scaling_is_applied_in_the_right_band(key, block, size) -> None:
    """Both published tables, read from config.json with either spelling of the type key."""
    theta, factor, original = (5e5, 32.0, 8192) if size == "llama3.2" else (1e4, 8.0, 64)
    scaling = {key: "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": original}  # fmt: skip
    rope = read_rope({block: scaling, "rope_theta": theta}, 131072)
    if size == "tiny":
        np.testing.assert_allclose(inverse_frequencies(rope, 16), LLAMA3_TINY_ROW, rtol=1e-9)
        return
    got = inverse_frequencies(rope, 64)
    unscaled = inverse_frequencies(RopeConfig(theta=theta), 64)
    np.testing.assert_array_equal(got[:15], unscaled[:15])
    np.testing.assert_allclose(
        got[15:18] / unscaled[15:18], [0.605573, 0.303743, 0.103448], 0, 5e-7
    )
    np.testing.assert_allclose(
        got[15:18], [1.290547928e-3, 4.295567966e-4, 9.708287803e-5], rtol=1e-9
    )
    np.testing.assert_allclose(got[18:], unscaled[18:] / 32, rtol=1e-15)
    assert got[31] == pytest.approx(9.418306725e-8, rel=1e-9)


def test_yarn_keeps_and_divides_outside_the_ramp() -> None:
    unscaled = inverse_frequencies(RopeConfig(theta=1e4), 64)
    got = inverse_frequencies(YARN, 64)
    np.testing.assert_array_equal(got[:11], unscaled[:11])
    np.testing.assert_allclose(got[23:], unscaled[23:] / 8, rtol=1e-15)


@pytest.mark.parametrize(
    ("length", "base", "pair1", "pair3"),
    [
        (None, 10000.0, 1e-1, 1e-3),
        (100, 10000.0, 1e-1, 1e-3),
        (101, 10401.986831, 9.901954e-2, 9.708738e-4),
        (150, 33930.220207, 7.368063e-2, 4e-4),
        (400, 215443.469003, 4.641589e-2, 1e-4),
    ],
)
def test_dynamic_frequencies_follow_the_length(length, base, pair1, pair3) -> None:
    got = inverse_frequencies(DYNAMIC, 8, length)
    np.testing.assert_allclose(got, base ** -(np.arange(4) / 4), rtol=1e-9)
    np.testing.assert_allclose(got[[1, 3]], [pair1, pair3], rtol=1e-6)


def test_attention_factor() -> None:
    assert attention_factor(YARN) == pytest.approx(1.207944154, rel=1e-9)
    assert attention_factor(dataclasses.replace(YARN, attention_factor=0.7)) == 0.7
    assert attention_factor(dataclasses.replace(YARN, factor=1.0)) == 1.0
    both = dataclasses.replace(YARN, mscale=0.707, mscale_all_dim=1.0)
    expected = (0.0707 * math.log(8) + 1) / (0.1 * math.log(8) + 1)
    assert attention_factor(both) == pytest.approx(expected, rel=1e-12)
    one = dataclasses.replace(YARN, mscale=0.707)  # a single one of the two is ignored
    assert attention_factor(one) == attention_factor(YARN)
    for rope in (RopeConfig(), LINEAR, DYNAMIC, LLAMA32):
        assert attention_factor(dataclasses.replace(rope, attention_factor=0.5)) == 1.0


def test_yarn_without_truncation_uses_fractional_bounds() -> None:
    got = inverse_frequencies(dataclasses.replace(YARN, truncate=False), 64)
    unscaled = inverse_frequencies(RopeConfig(theta=1e4), 64)
    low = 64 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(1e4))
    high = 64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(1e4))
    divided = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(got, unscaled * (1 - divided + divided / 8), rtol=1e-12)
    assert not np.allclose(got, inverse_frequencies(YARN, 64), rtol=1e-4)


@pytest.mark.parametrize("rope", ALL_KINDS, ids=ROPE_KINDS)
def test_angles_are_exact_beyond_a_million_positions(rope) -> None:
    head_dim = 64
    table = make_rope_table(rope, head_dim, 2**31 - 1)
    rng = np.random.default_rng(0)
    edges = [0, 1, 1023, 1024, 1025, 8191, 8192, 131071, 1_048_575, 1_048_576, 2_000_000, 2**31 - 2]
    positions = np.concatenate([edges, rng.integers(0, 2_000_001, 2000)])
    cos, sin = jax.jit(rope_angles)(table, jnp.asarray(positions, jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    factor = attention_factor(rope)
    np.testing.assert_allclose(cos, factor * np.cos(angles), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, factor * np.sin(angles), rtol=0, atol=1e-6)


def test_tables_stay_small() -> None:
    table = make_rope_table(LLAMA32, 128, 1_048_576)
    assert table.low.nbytes == table.high.nbytes == 1024 * 64 * 2 * 4
    assert table.top is None
    assert make_rope_table(LLAMA32, 128, 1).high.shape == (1, 64, 2)
    endless = make_rope_table(LLAMA32, 128, 2**31 - 1)
    assert endless.top is not None and endless.top.nbytes == 2048 * 64 * 2 * 4


def test_dynamic_angles_use_prompt_length_then_position() -> None:
    table = make_rope_table(DYNAMIC, 8, 512)
    prompt_lens = np.array([60, 60, 100, 150, 150, 150, 150, 90, 90, 400])
    positions = np.array([0, 59, 100, 0, 99, 149, 150, 99, 100, 7])
    lengths = np.array([60, 60, 101, 150, 150, 150, 151, 100, 101, 400])
    cos, sin = jax.jit(dynamic_rope_angles, static_argnums=0)(
        DYNAMIC, table, jnp.asarray(positions, jnp.int32), jnp.asarray(prompt_lens, jnp.int32)
    )
    assert cos.dtype == sin.dtype == jnp.float32
    angles = np.stack(
        [
            p * inverse_frequencies(DYNAMIC, 8, int(n))
            for p, n in zip(positions, lengths, strict=True)
        ]
    )
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=5e-5)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=5e-5)
    short = lengths <= 100
    plain_cos, _ = rope_angles(table, jnp.asarray(positions, jnp.int32))
    np.testing.assert_array_equal(np.asarray(cos)[short], np.asarray(plain_cos)[short])


@settings(deadline=None, max_examples=40)
@given(
    trained=st.integers(16, 8192),
    factor=st.floats(1.0, 16.0),
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    head_dim=st.sampled_from([8, 64, 128]),
    stretch=st.floats(1.0, 8.0),
    place=st.floats(0.0, 1.0),
)
def test_dynamic_angles_error_grows_only_with_the_position(
    trained, factor, theta, head_dim, stretch, place
) -> None:
    rope = RopeConfig(kind="dynamic", theta=theta, factor=factor, original_max_position=trained)
    prompt_len = int(trained * stretch) + 1
    position = int(place * (prompt_len - 1))
    table = make_rope_table(rope, head_dim, prompt_len)
    cos, sin = dynamic_rope_angles(
        rope, table, jnp.array([position], jnp.int32), jnp.array([prompt_len], jnp.int32)
    )
    angles = position * inverse_frequencies(rope, head_dim, prompt_len)
    tolerance = 1e-6 + 1e-6 * position
    np.testing.assert_allclose(cos[0], np.cos(angles), rtol=0, atol=tolerance)
    np.testing.assert_allclose(sin[0], np.sin(angles), rtol=0, atol=tolerance)


def test_rotate_rotates_half_split_pairs() -> None:
    x = jnp.arange(12, dtype=jnp.float32).reshape(1, 2, 6)
    angles = np.array([[0.1, 0.2, 0.3]])
    got = rotate(
        x, jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    )
    as_complex = (np.arange(12).reshape(2, 2, 3) * np.array([1, 1j])[None, :, None]).sum(1)
    turned = as_complex * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)[None]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rotate_computes_in_fp32_and_keeps_the_dtype(dtype) -> None:
    x = jax.random.normal(jax.random.key(0), (5, 3, 16), jnp.float32).astype(dtype)
    table = make_rope_table(LLAMA3_TINY, 16, 100)
    cos, sin = rope_angles(table, jnp.arange(5, dtype=jnp.int32) * 17)
    got = rotate(x, cos, sin)
    assert got.dtype == dtype
    expected = rotate(x.astype(jnp.float32), cos, sin).astype(dtype)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@settings(deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(ROPE_KINDS),
    base=st.integers(0, 1_000_000),
    offset=st.integers(0, 1_000_000),
)
def test_scores_depend_on_the_distance_only(kind: RopeKind, base: int, offset: int) -> None:
    rope = RopeConfig(kind=kind, theta=5e5, factor=4.0, original_max_position=8192)
    table = make_rope_table(rope, 16, 2_000_001)
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 1, 16), jnp.float32)

    def score(q_position: int, k_position: int) -> float:
        turned = [
            np.asarray(rotate(x, *rope_angles(table, jnp.array([p], jnp.int32))))
            for x, p in ((q, q_position), (k, k_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(base + 37, base) == pytest.approx(
        score(base + offset + 37, base + offset), abs=1e-4
    )
