"""Tiny checkpoints of every family and rope kind against logits that transformers computed."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from swiftjax import kernels
from swiftjax.converters.load import LoadedCheckpoint, load_checkpoint
from swiftjax.model_config import FAMILIES, ROPE_KINDS
from tests.forward import forward_logits
from tests.model.golden_cases import MODELS

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def loaded() -> dict[str, LoadedCheckpoint]:
    return {}


def _load(loaded: dict[str, LoadedCheckpoint], name: str) -> LoadedCheckpoint:
    if name not in loaded:
        loaded[name] = load_checkpoint(GOLDENS / name, dtype="float32")
    return loaded[name]


def _expected(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(GOLDENS / name / "expected.npz") as file:
        return file["token_ids"].tolist(), file["logits"]


def _chunks(total: int, first: int) -> list[int]:
    """A first chunk, a few uneven ones, and single tokens (decode steps) at the end."""
    sizes = [first]
    while total - sum(sizes) > 8:
        sizes.append(min(5 + 3 * len(sizes), total - sum(sizes) - 8))
    return [*sizes, *[1] * (total - sum(sizes))]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, loaded: dict[str, LoadedCheckpoint]) -> None:
    token_ids, logits = _expected(name)
    checkpoint = _load(loaded, name)
    got = forward_logits(checkpoint.config, checkpoint.params, token_ids)
    assert got.dtype == np.float32 and np.std(logits) > 1
    np.testing.assert_allclose(got, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "page_size", "implementation"),
    [
        ("llama-3.1", 16, "xla"),
        ("llama-dynamic", 4, "xla"),
        ("mistral-window", 4, "xla"),
        ("mistral-window", 1, "reference"),
        ("qwen3-layer-types", 4, "xla"),
    ],
)
def test_chunks_and_paged_decode_equal_a_full_forward(
    name: str,
    page_size: int,
    implementation: kernels.Implementation,
    loaded: dict[str, LoadedCheckpoint],
) -> None:
    token_ids, logits = _expected(name)
    checkpoint = _load(loaded, name)
    got = forward_logits(
        checkpoint.config,
        checkpoint.params,
        token_ids,
        chunks=_chunks(len(token_ids), first=13),
        page_size=page_size,
        implementation=implementation,
    )
    np.testing.assert_allclose(got, logits, rtol=0, atol=TOLERANCE)


def test_b021_both_places_of_rope_theta_give_the_same_logits(tmp_path: Path) -> None:
    """The same weights at positions 0..200 under each spelling; theta 10000 is told apart."""
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, 96, 201).tolist()

    def logits(rope: str) -> np.ndarray:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(GOLDENS / "llama-3", directory)
        config = directory / "config.json"
        text = config.read_text()
        assert '"rope_theta": 500000.0' in text
        config.write_text(text.replace('"rope_theta": 500000.0', rope))
        checkpoint = load_checkpoint(directory, dtype="float32")
        return forward_logits(checkpoint.config, checkpoint.params, token_ids)

    top = logits('"rope_theta": 500000.0')
    nested = logits('"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}')
    np.testing.assert_array_equal(top, nested)
    neither = logits('"rope_parameters": null')
    np.testing.assert_array_equal(neither, logits('"rope_theta": 10000.0'))
    assert np.abs(top - neither).max() > 0.1


def test_goldens_cover_every_family_and_rope_kind(loaded: dict[str, LoadedCheckpoint]) -> None:
    configs = [_load(loaded, name).config for name in MODELS]
    assert {c.family for c in configs} == set(FAMILIES)
    assert {c.rope.kind for c in configs} == set(ROPE_KINDS)
    assert any(c.qkv_bias and c.output_bias and c.mlp_bias for c in configs)
    assert any(c.tie_word_embeddings for c in configs)
    assert any(not c.tie_word_embeddings for c in configs)
    assert any(c.head_dim * c.num_heads != c.hidden_size for c in configs)
