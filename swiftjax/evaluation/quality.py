"""Perplexity of a model on a text, and how far its predictions are from those of a baseline.

Every piece of the text is a context of its own, and every token but the first of a piece is
scored. Called by `swiftjax eval` and by whoever measures what a smaller format costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from swiftjax.model.text_pass import TextPass


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """What a model made of each scored token, and what a baseline made of it; losses in nats."""

    losses: Float32[np.ndarray, " N"]  # minus the log-probability of the token that came
    baseline_losses: Float32[np.ndarray, " N"] | None = None
    divergences: Float32[np.ndarray, " N"] | None = None  # KL(baseline || model)
    agreements: Bool[np.ndarray, " N"] | None = None  # both find the same token the likeliest


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """The scores in a few numbers; the last four are None without a baseline."""

    num_tokens: int
    perplexity: float
    baseline_perplexity: float | None = None
    loss_increase: float | None = None  # mean difference of the losses, nats per token
    loss_increase_error: float | None = None  # its standard error
    divergence: float | None = None  # mean, nats per token
    agreement: float | None = None  # share of tokens

    @property
    def perplexity_change(self) -> float | None:
        """(perplexity - baseline's) / baseline's."""
        return None if self.loss_increase is None else float(np.expm1(self.loss_increase))


def score_texts(
    model: TextPass,
    pieces: Sequence[Int32[np.ndarray, " T"]],
    *,
    baseline: TextPass | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenScores:
    """Run all pieces; `progress` is told (pieces done, pieces in all)."""
    parts = []
    for done, piece in enumerate(pieces, start=1):
        scores = model.log_probs(piece)
        targets = np.zeros(model.length, np.int32)
        targets[: len(piece) - 1] = piece[1:]
        if baseline is None:
            part = (_losses(scores, targets),)
        else:
            part = _compare(scores, baseline.log_probs(piece), targets)
        parts.append([np.asarray(values)[: len(piece) - 1] for values in part])
        if progress is not None:
            progress(done, len(pieces))
    joined = [np.concatenate(values) for values in zip(*parts, strict=True)]
    names = ("losses", "baseline_losses", "divergences", "agreements")
    return TokenScores(**dict(zip(names, joined, strict=False)))


def summarise(scores: TokenScores) -> Quality:
    """The means of all tokens."""
    count, perplexity = len(scores.losses), _perplexity(scores.losses)
    if scores.baseline_losses is None:
        return Quality(num_tokens=count, perplexity=perplexity)
    assert scores.divergences is not None and scores.agreements is not None
    increases = np.subtract(scores.losses, scores.baseline_losses, dtype=np.float64)
    return Quality(
        num_tokens=count,
        perplexity=perplexity,
        baseline_perplexity=_perplexity(scores.baseline_losses),
        loss_increase=float(increases.mean()),
        loss_increase_error=float(increases.std() / count**0.5),
        divergence=float(scores.divergences.mean(dtype=np.float64)),
        agreement=float(scores.agreements.mean()),
    )


def _perplexity(losses: Float32[np.ndarray, " N"]) -> float:
    return float(np.exp(losses.mean(dtype=np.float64)))


@jax.jit
def _losses(scores: Float32[Array, "T V"], targets: Int32[Array, " T"]) -> Float32[Array, " T"]:
    return -jnp.take_along_axis(scores, targets[:, None], axis=1)[:, 0]


@jax.jit
def _compare(
    scores: Float32[Array, "T V"], baseline: Float32[Array, "T V"], targets: Int32[Array, " T"]
) -> tuple[Array, Array, Array, Array]:
    # A probability that is zero in float32 adds nothing, whatever the other's logarithm is.
    terms = jnp.where(jnp.exp(baseline) > 0, jnp.exp(baseline) * (baseline - scores), 0.0)
    agrees = jnp.argmax(scores, axis=1) == jnp.argmax(baseline, axis=1)
    return _losses(scores, targets), _losses(baseline, targets), terms.sum(axis=1), agrees
