"""Sampling on the device against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftjax.batch import NONE, NUM_TOP, SamplingBatch, empty_edits, empty_sampling
from swiftjax.engine.generation import MIN_TEMPERATURE
from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import InvalidRequestError
from swiftjax.model.filters import first_to_reach, keep_mask, sortable, typical_mask
from swiftjax.model.logprobs import log_total, top_logprobs
from swiftjax.model.penalties import empty_counts
from swiftjax.model.sampling import Logits, SampledTokens, draw, draw_filtered, greedy, sample

LOGITS = [2.0, 1.0, 0.0, -1.0]


@jax.jit
def _sample(logits: jax.Array, sampling: SamplingBatch) -> tuple[jax.Array, jax.Array]:
    """Tokens and log-probabilities without edits or penalties."""
    rows, vocab_size = logits.shape
    raw = Logits(logits, log_total(logits))
    token_ids, scores = sample(raw, sampling, empty_edits(rows), empty_counts(1, vocab_size))
    return token_ids, scores.logprobs


def rows(count: int, *, seed: int = 0, **settings: float) -> SamplingBatch:
    """The same settings on every row, at temperature 1 and positions 0, 1, 2, ..."""
    batch = empty_sampling(count)
    for name, value in {"temperature": 1.0, **settings}.items():
        getattr(batch, name)[:] = value
    batch.seeds[:, 0] = seed
    batch.sample_positions[:] = np.arange(count)
    return batch


def kept_ids(**settings: float) -> set[int]:
    scores, sampling = jnp.array([LOGITS]), jax.tree.map(jnp.asarray, rows(1, **settings))
    mask = typical_mask(scores, keep_mask(scores, sortable(scores), sampling), sampling)
    return set(np.flatnonzero(np.asarray(mask)[0]).tolist())


@pytest.mark.parametrize(
    ("top_p", "size"), [(0.0, 1), (1e-9, 1), (0.64, 1), (0.65, 2), (0.88, 2), (0.89, 3), (1.0, 4)]
)
def test_b013_top_p_kept_set(top_p: float, size: int) -> None:
    """top_p keeps the smallest set whose mass reaches it; 0 keeps the most likely token."""
    assert kept_ids(top_p=top_p) == set(range(size))


@pytest.mark.parametrize(("top_k", "size"), [(-1, 4), (0, 4), (1, 1), (3, 3), (10**6, 4)])
def test_b013_top_k_kept_set(top_k: int, size: int) -> None:
    """top_k 0, -1 and more than the vocabulary keep everything."""
    assert kept_ids(top_k=GenerationConfig(top_k=top_k).top_k) == set(range(size))


@pytest.mark.parametrize("bad", [{"top_k": -2}, {"top_p": 1.1}, {"top_p": -0.1}])
def test_b013_out_of_range_is_refused(bad: dict) -> None:
    with pytest.raises(InvalidRequestError, match="must lie in"):
        GenerationConfig(**bad)


@pytest.mark.parametrize(
    "settings_",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 0, "top_p": 0.0},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"temperature": MIN_TEMPERATURE},
    ],
)
def test_b013_never_index_zero_by_accident(settings_: dict) -> None:
    """Every way of asking for the most likely token gives it, wherever it stands."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(16, 50)), jnp.float32)
    tokens, _ = _sample(logits.at[:, 0].set(-30.0), rows(16, **settings_))
    assert tokens.tolist() == np.asarray(logits).argmax(-1).tolist()


def test_logprobs_are_raw_at_any_temperature() -> None:
    expected = [-0.44018970, -1.44018970, -2.44018970, -3.44018970]
    logits = jnp.tile(jnp.array([LOGITS]), (64, 1))
    for temperature in (0.0, 0.5, 2.0):
        tokens, logprobs = _sample(logits, rows(64, temperature=temperature, top_p=0.9))
        np.testing.assert_allclose(logprobs, np.take(expected, tokens), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1.0, 0.89])
def test_draws_follow_the_softmax(temperature: float, top_p: float) -> None:
    count = 20_000
    logits = jnp.tile(jnp.array([LOGITS]), (count, 1))
    tokens, _ = _sample(logits, rows(count, temperature=temperature, top_p=top_p))
    p = np.exp(np.array(LOGITS) / temperature)
    p /= p.sum()
    keep = np.cumsum(p) - p < top_p
    p = np.where(keep, p, 0.0) / p[keep].sum()
    frequency = np.bincount(np.asarray(tokens), minlength=4) / count
    sigma = np.sqrt(p * (1 - p) / count)
    assert (np.abs(frequency - p) <= 4 * sigma + 1e-12).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), position=st.integers(0, 10**6), data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(
    seed: int, position: int, data: st.DataObject
) -> None:
    """(seed, position) alone decide: any row, any company, filtered neighbours or not."""
    logits = np.random.default_rng(seed).normal(size=50).astype(np.float32)

    def draw(row: int, others: dict) -> int:
        batch = rows(4, **others)
        for name, value in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
            getattr(batch, name)[row] = value
        batch.seeds[row] = [seed, 0]
        batch.sample_positions[row] = position
        tokens, _ = _sample(jnp.asarray(np.tile(logits, (4, 1))), batch)
        return int(tokens[row])

    row = data.draw(st.integers(0, 3))
    alone = draw(0, {"temperature": 0.0})
    assert draw(row, {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "seed": 9}) == alone
    assert draw(row, {"temperature": 1.3}) == alone


def test_masked_tokens_are_never_chosen() -> None:
    """Greedy and drawn; the last word of a mask has bits beyond the vocabulary."""
    vocab_size, allowed = 70, [0, 31, 32, 69]
    masks = np.full((3, 3), -1, np.int32)
    bits = np.zeros(96, bool)
    bits[allowed] = True
    masks[:2] = np.packbits(bits, bitorder="little").view(np.int32)
    settings = empty_sampling(3)
    settings.temperature[1] = 5.0
    edits, counts = empty_edits(3), empty_counts(1, vocab_size)
    logits = jnp.asarray(np.linspace(0, 5, 3 * vocab_size, dtype=np.float32).reshape(3, -1))
    logits = logits.at[:, 69].set(-5.0)
    raw = Logits(logits, log_total(logits))
    run = jax.jit(sample)
    for position in range(50):
        settings.sample_positions[:] = position
        best, drawn, free = run(raw, settings, edits, counts, jnp.asarray(masks)).token_ids
        assert (best, free) == (32, 68) and int(drawn) in allowed


def _first_by_sorting(keys: np.ndarray, weights: np.ndarray, limit: float) -> np.ndarray:
    """One row of `first_to_reach`, the plain way."""
    order = np.argsort(-keys.astype(np.int64), kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = np.zeros(len(keys), bool)
    kept[order[before < max(limit, 1e-30)]] = True
    return kept


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_cut_off_found_by_bisection_equals_sorting(data: st.DataObject) -> None:
    """Many equal keys, weights of 0, limits met exactly, never, and from the start."""
    few = st.sampled_from([0, 1, 7, 8, 2**31, 2**32 - 1])
    row = st.lists(few, min_size=37, max_size=37)
    keys = np.array(data.draw(st.lists(row, min_size=3, max_size=3)), np.uint32)
    sizes = st.lists(st.integers(0, 5), min_size=37, max_size=37)
    weights = np.array(data.draw(st.lists(sizes, min_size=3, max_size=3)), np.float32)
    limit = np.array(data.draw(st.lists(st.integers(0, 200), min_size=3, max_size=3)), np.float32)
    limit[data.draw(st.integers(0, 2))] = data.draw(st.sampled_from([np.inf, 0.0, 1e-9]))
    kept = _first_to_reach(keys, weights, limit)
    for i in range(3):
        # A key whose weight is 0 counts for nothing: kept or not, nobody draws it.
        wanted = _first_by_sorting(keys[i], weights[i], limit[i])
        np.testing.assert_array_equal(
            np.asarray(kept[i]) & (weights[i] > 0), wanted & (weights[i] > 0)
        )


_first_to_reach = jax.jit(first_to_reach)


def test_alternatives_equal_sorting() -> None:
    """Equal scores by id, banned tokens last, small vocabularies padded."""
    rng = np.random.default_rng(3)
    for size in (7, 300):
        logits = rng.integers(-4, 4, (5, size)).astype(np.float32)
        logits[:, rng.permutation(size)[: size // 2]] = -np.inf
        logits[:, 1] = -0.0
        ids, logprobs = jax.jit(top_logprobs)(jnp.asarray(logits), log_total(jnp.asarray(logits)))
        count = min(size, NUM_TOP)
        wanted = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
        np.testing.assert_array_equal(ids[:, :count], wanted)
        assert (np.asarray(ids)[:, count:] == NONE).all()
        scores = np.take_along_axis(logits, wanted, -1)
        exact = scores - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(logprobs[:, :count], exact, rtol=1e-5)


def test_samplers_agree_bit_for_bit() -> None:
    """A row gets the same token and log-probability from every sampler that can do what it asks."""
    rng, count = np.random.default_rng(5), 12
    logits = jnp.asarray(rng.normal(size=(count, 300)) * 3, jnp.bfloat16)
    raw = Logits(logits, log_total(logits.astype(jnp.float32)))
    batch = rows(count)
    batch.temperature[:4] = 0.0
    batch.temperature[8:] = 0.7
    edits, counts = empty_edits(count), empty_counts(1, 300)
    full = jax.jit(sample)

    def equal(ours: SampledTokens, theirs: SampledTokens, rows: slice = slice(None)) -> None:
        np.testing.assert_array_equal(ours.token_ids[rows], theirs.token_ids[rows])
        np.testing.assert_array_equal(ours.scores.logprobs[rows], theirs.scores.logprobs[rows])

    plain = full(raw, batch, edits, counts)
    equal(jax.jit(greedy)(raw), plain, slice(4))
    equal(jax.jit(draw)(raw, batch), plain)
    batch.top_k[::3], batch.top_p[::2], batch.min_p[1::4] = 20, 0.8, 0.05
    equal(jax.jit(draw_filtered)(raw, batch), full(raw, batch, edits, counts))


def test_scores_that_a_temperature_makes_equal_keep_their_order() -> None:
    """In every sampler, whatever the neighbours of a row make of the batch."""
    steps = np.float32(1.9).view(np.int32) + np.arange(65, dtype=np.int32)
    neighbours = steps.view(np.float32)  # of which some give the same number when divided
    logits = jnp.asarray(np.stack([neighbours[:-1], neighbours[1:]], axis=1))
    raw, batch = Logits(logits, log_total(logits)), rows(64, temperature=1.7, top_k=1)
    batch = jax.tree.map(jnp.asarray, batch)
    assert draw_filtered(raw, batch).token_ids.all()
    assert sample(raw, batch, empty_edits(64), empty_counts(1, 2)).token_ids.all()
