"""Draws what `swiftjax eval` found; needs matplotlib, which the extra `plot` installs."""

from pathlib import Path

import numpy as np
from jaxtyping import Float32

from swiftjax.evaluation.quality import TokenScores
from swiftjax.replay.plot import check_matplotlib

SMALLEST = 1e-8  # nats; what is nearer than rounding is drawn here


def plot_scores(path: Path, scores: TokenScores, *, piece: int, title: str) -> None:
    """Draw perplexity by place in the context of `piece` scored tokens and, beside it, divergence.

    Raises UnsupportedError without matplotlib.
    """
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = scores.baseline_losses is not None
    figure, axes = pyplot.subplots(1, 2 if pairs else 1, figsize=(9 if pairs else 5, 3.6))
    left, *right = np.atleast_1d(axes)
    for name, losses in (("baseline", scores.baseline_losses), ("model", scores.losses)):
        if losses is not None:
            left.plot(*_by_place(losses, piece), label=name)
    left.set_xlabel("tokens before it")
    left.set_ylabel("perplexity")
    left.legend(fontsize=7)
    for axes in right:
        assert scores.divergences is not None
        values = np.sort(np.maximum(scores.divergences, SMALLEST))
        axes.semilogx(values, 1 - np.arange(len(values)) / len(values))
        axes.set_xlabel("KL divergence to the baseline, nats")
        axes.set_ylabel("share of tokens above it")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _by_place(losses: Float32[np.ndarray, " N"], piece: int) -> tuple[np.ndarray, np.ndarray]:
    """Perplexity of tokens that stand about as far from the start of their piece."""
    means = losses.reshape(-1, piece).mean(axis=0)
    parts = np.array_split(means, min(16, piece))
    ends = np.cumsum([len(part) for part in parts])
    middles = ends - [len(part) / 2 for part in parts]
    return middles, np.exp([part.mean() for part in parts])
