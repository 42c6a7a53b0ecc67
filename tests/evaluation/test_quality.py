"""Perplexity, divergence and agreement against plain arithmetic, and on the demo model."""

from pathlib import Path

import numpy as np
import pytest

from swiftjax.errors import InvalidRequestError
from swiftjax.evaluation.loading import load_scored
from swiftjax.evaluation.quality import Quality, score_texts, summarise
from swiftjax.evaluation.texts import cut_text, read_text
from swiftjax.model.text_pass import TextPass
from tests.numpy_llama import numpy_logits
from tests.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint

LENGTH = 24
CONFIG = tiny_config()
SEEDS = (0, 5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextPass, TextPass]:
    """Two random models, ready for pieces of 24 tokens."""
    folder = tmp_path_factory.mktemp("models")
    paths = [write_checkpoint(folder / str(s), CONFIG, tiny_tensors(CONFIG, s)) for s in SEEDS]
    first, second = (
        load_scored(
            str(path), dtype="float32", quantization=None, length=LENGTH, implementation="xla"
        ).model
        for path in paths
    )
    return first, second


def numpy_scores(seed: int, piece: np.ndarray) -> np.ndarray:
    """Log-probabilities [T V] of one of the models, by another program."""
    logits = numpy_logits(CONFIG, tiny_tensors(CONFIG, seed), piece.tolist())
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_scores_are_those_of_plain_arithmetic(models: tuple[TextPass, TextPass]) -> None:
    pieces = list(np.random.default_rng(0).integers(0, 256, (3, LENGTH)).astype(np.int32))
    got = score_texts(models[0], pieces, baseline=models[1])
    losses, base_losses, divergences, agreements = [], [], [], []
    for piece in pieces:
        ours, theirs = (numpy_scores(seed, piece)[:-1] for seed in SEEDS)
        losses += (-ours[np.arange(LENGTH - 1), piece[1:]]).tolist()
        base_losses += (-theirs[np.arange(LENGTH - 1), piece[1:]]).tolist()
        divergences += (np.exp(theirs) * (theirs - ours)).sum(axis=1).tolist()
        agreements += (ours.argmax(axis=1) == theirs.argmax(axis=1)).tolist()
    np.testing.assert_allclose(got.losses, losses, atol=1e-5)
    assert got.baseline_losses is not None and got.divergences is not None
    np.testing.assert_allclose(got.baseline_losses, base_losses, atol=1e-5)
    np.testing.assert_allclose(got.divergences, divergences, atol=1e-5)
    np.testing.assert_array_equal(got.agreements, agreements)
    quality = summarise(got)
    assert quality.num_tokens == 3 * (LENGTH - 1)
    assert quality.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    change = np.exp(np.mean(losses) - np.mean(base_losses)) - 1
    assert quality.perplexity_change == pytest.approx(change, rel=1e-3)
    assert quality.agreement == np.mean(agreements)


def test_a_model_does_not_differ_from_itself(models: tuple[TextPass, TextPass]) -> None:
    model, pieces = models[0], [np.arange(LENGTH, dtype=np.int32)]
    quality = summarise(score_texts(model, pieces, baseline=model))
    assert (quality.divergence, quality.agreement, quality.perplexity_change) == (0.0, 1.0, 0.0)
    alone = summarise(score_texts(model, pieces))
    assert alone == Quality(num_tokens=LENGTH - 1, perplexity=quality.perplexity)


def test_a_short_piece_is_scored_as_in_a_long_one(models: tuple[TextPass, TextPass]) -> None:
    """What a piece does not fill is padding."""
    model, piece = models[0], np.arange(LENGTH, dtype=np.int32)
    whole, part = score_texts(model, [piece]), score_texts(model, [piece[:9]])
    np.testing.assert_allclose(part.losses, whole.losses[:8], atol=1e-6)


def test_a_piece_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path / "tiny", CONFIG)
    with pytest.raises(InvalidRequestError, match="257 tokens cannot be scored"):
        load_scored(str(tiny), dtype=None, quantization=None, length=257, implementation=None)


@pytest.mark.demo_model
def test_perplexity_of_a_language_model_is_what_transformers_finds(demo_gguf: Path) -> None:
    """A short slice: docs/quantisation.md has the figures of a longer one."""
    loaded = load_scored(
        str(demo_gguf), dtype="float32", quantization=None, length=64, implementation="xla"
    )
    pieces = cut_text(read_text(None), loaded.tokenizer, length=64, num_tokens=256)
    quality = summarise(score_texts(loaded.model, pieces))
    assert quality.num_tokens == 252
    # transformers 5.24 with the same file, float32 and pieces.
    assert quality.perplexity == pytest.approx(70.03731, rel=2e-4)
