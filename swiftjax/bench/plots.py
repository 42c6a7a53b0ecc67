"""A plot beside a result file: how near every figure comes to its limit. Needs matplotlib."""

import json
from pathlib import Path

from swiftjax.errors import InvalidRequestError


def plot_fractions(path: Path) -> Path:
    """Draw the fractions of the limit of a result file; returns the picture's path."""
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidRequestError("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [r for r in json.loads(path.read_text()) if "fraction_of_limit" in r]
    if not records:
        raise InvalidRequestError(f"{path} has no figure with a limit; nothing can be drawn")
    names = [f"{r['workload']}, {r['dtype']}\n{r['batch']} x {r['context']}" for r in records]
    figure, axes = pyplot.subplots(figsize=(10, 0.55 * len(records) + 1.2), layout="constrained")
    is_rate = [r["unit"].endswith("/s") for r in records]
    colors = ["tab:blue" if rate else "tab:orange" for rate in is_rate]
    bars = axes.barh(names, [r["fraction_of_limit"] for r in records], color=colors)
    axes.bar_label(bars, [f"{r['value']:.4g} {r['unit']}" for r in records], padding=3)
    axes.set_xlim(0, 1.2)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"fraction of the limit, {records[0]['gpu']} (blue: rates, orange: times)")
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target
