"""The chain from raw scores to the distribution that is drawn from, for one row, in float64.

Follows docs/sampling.md step by step, one line or loop per rule; shares nothing with the device
code.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from swiftjax.engine.request import GenerationConfig


def processed_scores(
    logits: np.ndarray,
    config: GenerationConfig,
    *,
    prompt: SequenceOf[int],
    output: SequenceOf[int],
    edits: Mapping[int, float],
    only_listed: bool,
) -> np.ndarray:
    """Scores after penalties, edits and temperature."""
    scores = logits.astype(np.float64)
    for token_id in {*prompt, *output}:
        if scores[token_id] > 0:
            scores[token_id] /= config.repetition_penalty
        else:
            scores[token_id] *= config.repetition_penalty
    for token_id in set(output):
        scores[token_id] -= config.frequency_penalty * list(output).count(token_id)
        scores[token_id] -= config.presence_penalty
    for token_id in range(len(scores)):
        if token_id in edits:
            scores[token_id] += edits[token_id]
        elif only_listed:
            scores[token_id] = -np.inf
    return scores / (config.temperature or 1.0)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Log-probabilities."""
    shifted = scores - scores.max()
    return shifted - np.log(np.exp(shifted).sum())


def kept_probs(scores: np.ndarray, config: GenerationConfig) -> np.ndarray:
    """Probabilities after the filters, 0 for what they drop."""
    if config.temperature == 0:
        return np.eye(len(scores))[scores.argmax()]
    probs = np.exp(log_softmax(scores))
    descending = np.argsort(-probs, kind="stable")
    if config.top_k:
        probs = _keep(probs, descending[: config.top_k])
    if config.top_p < 1:
        probs = _keep(probs, _until(probs, descending, config.top_p))
    probs = _keep(probs, np.flatnonzero(probs >= config.min_p * probs.max()))
    if config.typical_p < 1:
        with np.errstate(divide="ignore"):
            surprise = -np.log(probs)
        entropy = sum(p * s for p, s in zip(probs, surprise, strict=True) if p > 0)
        nearest = np.argsort(np.abs(surprise - entropy), kind="stable")
        probs = _keep(probs, _until(probs, nearest, config.typical_p))
    return probs


def _until(probs: np.ndarray, order: np.ndarray, mass: float) -> list[int]:
    """The first ids of `order` whose probabilities together reach `mass`; at least one."""
    kept: list[int] = []
    for token_id in order:
        if kept and sum(probs[kept]) >= mass:
            break
        kept.append(int(token_id))
    return kept


def _keep(probs: np.ndarray, ids: SequenceOf[int] | np.ndarray) -> np.ndarray:
    kept = np.zeros_like(probs)
    kept[ids] = probs[ids]
    return kept / kept.sum()
