"""The whole chain of score changes and filters against a plain float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swiftjax.batch import PROMPT_BIT, SamplingBatch, TokenEdits, empty_edits, empty_sampling
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.rows import RowTable, count_tokens
from swiftjax.engine.sequence import Sequence
from swiftjax.model.filters import keep_mask, sortable, typical_mask
from swiftjax.model.logprobs import log_total
from swiftjax.model.penalties import apply_edits, apply_penalties, count_sampled, empty_counts
from swiftjax.model.sampling import Logits, SampledTokens, sample
from tests.fakes import make_fake_core, make_request
from tests.model.sampling_reference import kept_probs, log_softmax, processed_scores

V = 24
ROWS = 4
_core = make_fake_core(vocab_size=V)


@jax.jit
def _run(
    logits: jax.Array, sampling: SamplingBatch, edits: TokenEdits, counts: jax.Array
) -> tuple[SampledTokens, jax.Array]:
    """The sample, and the ids [R V] that could have been drawn."""
    changed = apply_edits(apply_penalties(logits, counts, sampling), edits)
    scaled = changed / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    kept = typical_mask(scaled, keep_mask(scaled, sortable(scaled), sampling), sampling)
    raw = Logits(logits, log_total(logits))
    return sample(raw, sampling, edits, counts), kept & (scaled > -jnp.inf)


ids = st.integers(0, V - 1)
configs = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 3, 10, 1000]),
        "top_p": st.sampled_from([0.0, 0.37, 0.81, 1.0]),
        "min_p": st.sampled_from([0.0, 0.033, 0.21, 1.0]),
        "typical_p": st.sampled_from([0.0, 0.29, 0.77, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.9]),
        "presence_penalty": st.sampled_from([0.0, 1.1, -0.6]),
        "frequency_penalty": st.sampled_from([0.0, 0.45, -1.3]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=4),
        "allowed_token_ids": st.none() | st.lists(ids, min_size=6, max_size=10, unique=True),
        "banned_token_ids": st.lists(ids, max_size=4),
        "bad_words_ids": st.lists(st.lists(ids, min_size=2, max_size=3), max_size=3),
        "min_new_tokens": st.sampled_from([0, 3]),
        "stop_token_ids": st.just((1,)),
        "logprobs": st.sampled_from([None, 3, 20]),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(configs, st.lists(ids, min_size=1, max_size=8), st.lists(ids, max_size=8)),
        min_size=ROWS,
        max_size=ROWS,
    ),
    noise=st.integers(0, 10**6),
)
def test_device_equals_reference(rows: list[tuple[dict, list[int], list[int]]], noise: int) -> None:
    """Any mix of settings, row by row: kept tokens, the drawn one, and its log-probabilities."""
    logits = np.random.default_rng(noise).normal(scale=2.5, size=(ROWS, V)).astype(np.float32)
    table = RowTable(ROWS, 4)
    counts = np.zeros((ROWS, V), np.uint16)
    edits = empty_edits(ROWS)
    changes = []
    configs = [GenerationConfig(**wishes) for wishes, _, _ in rows]
    for row, (_, prompt, output) in enumerate(rows):
        config = configs[row]
        sequence = Sequence(make_request(_core, prompt, config), row)
        sequence.token_ids += output
        table.admit(sequence)
        assert sequence.row == row
        counts[row] = count_tokens(sequence, V)
        rules = sequence.rules
        values = {} if rules is None else rules.edits(sequence.token_ids)
        edits.ids[row, : len(values)] = list(values)
        edits.values[row, : len(values)] = list(values.values())
        edits.only_listed[row] = rules is not None and rules.only_listed
        changes.append(values)
    sampled, kept = _run(logits, table.sampling, edits, counts)
    for row, (_, prompt, output) in enumerate(rows):
        config = configs[row]
        scores = processed_scores(
            logits[row],
            config,
            prompt=prompt,
            output=output,
            edits=changes[row],
            only_listed=config.allowed_token_ids is not None,
        )
        probs = kept_probs(scores, config)
        token = int(sampled.token_ids[row])
        assert probs[token] > 0
        if config.temperature > 0:
            _same_set(np.asarray(kept[row]), probs, scores, config)
        raw = log_softmax(logits[row].astype(np.float64))
        expected = log_softmax(scores) if config.logprobs_mode == "processed" else raw
        tolerance = {"atol": 2e-4, "rtol": 1e-5}
        np.testing.assert_allclose(sampled.scores.logprobs[row], expected[token], **tolerance)
        if config.logprobs:
            best = np.sort(expected)[::-1][: config.logprobs]
            top = sampled.scores.top_logprobs[row, : config.logprobs]
            np.testing.assert_allclose(top, best, **tolerance)


def _same_set(
    kept: np.ndarray, probs: np.ndarray, scores: np.ndarray, config: GenerationConfig
) -> None:
    """Equal sets, unless two candidates are too near each other for float32 to tell apart."""
    finite = np.sort(scores[np.isfinite(scores)])
    assume(len(finite) < 2 or np.diff(finite).min() > 1e-4)
    if not np.array_equal(kept, probs > 0):
        wider = [
            kept_probs(scores + delta * np.random.default_rng(i).normal(size=V), config) > 0
            for i, delta in enumerate([1e-5] * 40)
        ]
        assert any(np.array_equal(kept, w) for w in wider), (kept, probs, scores, config)


def test_b017_repetition_divides_positive_and_multiplies_negative() -> None:
    logits = jnp.array([[1.0, -1.0, 0.5, 2.0]])
    sampling = empty_sampling(1)
    sampling.repetition_penalty[:] = 2.0
    sampling.count_rows[:] = 0
    counts = jnp.array([[PROMPT_BIT, 1, 0, 0]], jnp.uint16)
    changed = apply_penalties(logits, counts, jax.tree.map(jnp.asarray, sampling))
    np.testing.assert_allclose(changed, [[0.5, -2.0, 0.5, 2.0]])


def test_counts_saturate_and_keep_the_prompt_bit() -> None:
    counts = empty_counts(2, 4).at[1, 2].set(jnp.uint16(0xFFFF))
    rows, tokens = jnp.array([1, 0, 7], jnp.int32), jnp.array([2, 3, 1], jnp.int32)
    changed = np.asarray(jax.jit(count_sampled)(counts, rows, tokens))
    assert changed[1].tolist() == [0, 0, 0xFFFF, 0] and changed[0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    "config",
    [
        GenerationConfig(temperature=1.0, min_p=0.2),
        GenerationConfig(temperature=0.7, typical_p=0.6),
        GenerationConfig(temperature=1.5, top_k=5, top_p=0.9, min_p=0.05, typical_p=0.95),
        GenerationConfig(temperature=1.0, logit_bias={3: 2.0}, banned_token_ids=(0,)),
    ],
)
def test_draws_follow_the_reference(config: GenerationConfig) -> None:
    count = 20_000
    logits = np.random.default_rng(5).normal(size=V).astype(np.float32)
    sequence = Sequence(make_request(_core, [1], config), 0)
    table = RowTable(1, 4)
    table.admit(sequence)
    sampling = jax.tree.map(lambda x: np.repeat(x, count, axis=0), table.sampling)
    sampling.sample_positions[:] = np.arange(count)
    values = {} if sequence.rules is None else sequence.rules.edits([1])
    edits = empty_edits(1)
    edits.ids[0, : len(values)] = list(values)
    edits.values[0, : len(values)] = list(values.values())
    edits = jax.tree.map(lambda x: np.repeat(x[..., :8] if x.ndim > 1 else x, count, 0), edits)
    tiled = jnp.asarray(np.tile(logits, (count, 1)))
    raw = Logits(tiled, log_total(tiled))
    tokens = jax.jit(sample)(raw, sampling, edits, empty_counts(1, V)).token_ids
    scores = processed_scores(
        logits, config, prompt=[1], output=[], edits=values, only_listed=False
    )
    p = kept_probs(scores, config)
    frequency = np.bincount(np.asarray(tokens), minlength=V) / count
    assert (np.abs(frequency - p) <= 4.5 * np.sqrt(p * (1 - p) / count) + 1e-12).all()
