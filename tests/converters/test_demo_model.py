"""The demo model: published facts of the file, and fetching it without a network."""

from pathlib import Path

import numpy as np
import pytest

from swiftjax.converters.gguf_source import GgufSource
from swiftjax.converters.load import load_checkpoint
from tests.forward import forward_logits

FRANCE = [504, 3575, 282, 4649, 314]  # "The capital of France is"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.demo_model
def test_b038_q_and_k_rows_are_in_hugging_face_order(demo_gguf: Path) -> None:
    """Rows that the file keeps pairwise interleaved land where rotate-half looks for them."""
    source = GgufSource(demo_gguf)
    query = source.read("model.layers.0.self_attn.q_proj.weight")
    key = source.read("model.layers.0.self_attn.k_proj.weight")
    assert np.linalg.norm(query[32]) == pytest.approx(5.7964, abs=5e-5)
    assert np.linalg.norm(query[1]) == pytest.approx(9.2183, abs=5e-5)
    assert np.linalg.norm(key[32]) == pytest.approx(5.7897, abs=5e-5)


@pytest.mark.demo_model
def test_b038_b025_demo_model_log_probabilities(demo_gguf: Path) -> None:
    """Un-permuting, dequantising and tying together give the published log-probabilities."""
    loaded = load_checkpoint(demo_gguf, dtype="float32")
    assert loaded.config.tie_word_embeddings and "head.kernel" not in loaded.params
    logprobs = log_softmax(forward_logits(loaded.config, loaded.params, FRANCE))
    after = dict(zip((7042, 260, 4528), (-0.2581, -2.7408, -4.3844), strict=True))
    for token_id, expected in after.items():
        assert logprobs[-1, token_id] == pytest.approx(expected, abs=1e-3)
    prompt = [logprobs[i, token_id] for i, token_id in enumerate(FRANCE[1:])]
    assert prompt == pytest.approx([-11.5393, -0.3376, -2.4387, -0.4509], abs=1e-3)
