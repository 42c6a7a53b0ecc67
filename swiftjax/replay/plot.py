"""Draws what a replay found; needs matplotlib, which the extra `plot` installs.

Called by the `replay` command.
"""

from pathlib import Path

import numpy as np

from swiftjax.errors import UnsupportedError
from swiftjax.replay.comparison import Study


def check_matplotlib() -> None:
    """Raise UnsupportedError where nothing could be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "a plot needs matplotlib, which is not installed: pip install 'swiftjax[plot]'"
        ) from error


def plot(path: Path, study: Study, title: str) -> None:
    """Draw, per policy, first tokens and gaps as shares of requests, and who waited when."""
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (first, gaps, queue) = pyplot.subplots(1, 3, figsize=(12, 3.6))
    for name, run in zip(study.names, study.runs, strict=True):
        ttfts = [outcome.ttft for outcome in run.outcomes if outcome.ttft is not None]
        means = [float(np.mean(outcome.gaps)) for outcome in run.outcomes if outcome.gaps]
        first.plot(*_shares(ttfts), label=name)
        gaps.plot(*_shares(means))
        queue.plot(np.array(run.times) - min(run.times, default=0.0), run.num_waiting, lw=0.8)
    for axes, limit, text in (
        (first, study.goal.ttft, "time to first token, s"),
        (gaps, study.goal.inter_token, "mean time between tokens, s"),
    ):
        axes.axvline(limit, color="C7", linestyle=":")
        axes.set_xlabel(text)
        axes.set_ylabel("share of requests")
    first.set_xscale("log")
    gaps.set_xlim(left=0)
    queue.set_xlabel("time, s")
    queue.set_ylabel("requests waiting")
    first.legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _shares(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted values, and the share of all that is at most as large."""
    return np.sort(values), np.arange(1, len(values) + 1) / max(1, len(values))
