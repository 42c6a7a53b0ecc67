"""A plot beside a result file: curves, timelines, or how near figures come to limits.

Needs matplotlib.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftjax.errors import InvalidRequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_file(path: Path) -> Path:
    """Draw what a result file has to show; returns the picture's path."""
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidRequestError("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    try:
        records = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidRequestError(f"{path} is no file of records: {error}") from error
    if any("ms_by_stage" in r for r in records):
        return _plot_timelines(path, records)
    endless = [r for r in records if "tokens_at" in r]
    if curves := [r for r in records if "perplexity_at" in r]:
        return _plot_perplexity(path, curves)
    return _plot_endless(path, endless[-1]) if endless else _plot_fractions(path, records)


def _plot_endless(path: Path, record: dict[str, Any]) -> Path:
    """Time a token, pages and memory over the tokens generated so far."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    curves = {"ms_at": "ms a token", "pages_at": "pages in use", "rss_mib_at": "RSS, MiB"}
    for place, (name, label) in zip(axes, curves.items(), strict=True):
        place.plot(record["tokens_at"], record[name], linewidth=1)
        place.set_ylim(0, 1.15 * max(record[name]))
        place.set_xlabel("tokens generated")
        place.set_ylabel(label)
    sizes = f"sink {record['sink']}, window {record['window']}"
    figure.suptitle(f"{record['model']}, {record['dtype']}, {sizes}, {record['gpu']}")
    return _saved(figure, path)


def _plot_perplexity(path: Path, records: list[dict[str, Any]]) -> Path:
    """Perplexity along a text, of the records of the longest one."""
    from matplotlib import pyplot

    length = max(r["context"] for r in records)
    records = [r for r in records if r["context"] == length]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for record in records:
        sizes = "" if record["window"] is None else f" {record['sink']} + {record['window']}"
        label = f"{record['workload'].partition(', ')[2]}{sizes}: {record['value']:.4g}"
        axes.plot(record["places"], record["perplexity_at"], label=label)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel("perplexity there")
    axes.legend()
    axes.set_title(f"{records[0]['model']}, {records[0]['dtype']}, {records[0]['gpu']}")
    return _saved(figure, path)


def _plot_timelines(path: Path, records: list[dict[str, Any]]) -> Path:
    """A decode step of each batch: the host's stages, above the share that the device works."""
    from matplotlib import pyplot

    hosts = [r for r in records if "ms_by_stage" in r]
    idle = {_weights_and_batch(r): r["value"] / 100 for r in records if "ms_by_kernel" in r}
    figure, axes = pyplot.subplots(figsize=(10, 0.9 * len(hosts) + 1.4), layout="constrained")
    names: list[str] = []
    for record in hosts:
        stages, key = record["ms_by_stage"], _weights_and_batch(record)
        bars = {"{}, {} rows: host".format(*key): stages}
        if key in idle:
            whole = sum(stages.values())
            parts = {"device works": whole * (1 - idle[key]), "idle": whole * idle[key]}
            bars["{}, {} rows: device".format(*key)] = parts
        for name, parts in bars.items():
            names.append(name)
            left = 0.0
            for stage, ms in parts.items():
                axes.barh(name, ms, left=left, color=_STAGE_COLORS[stage])
                left += ms
    for stage, color in _STAGE_COLORS.items():
        axes.barh(names[0], 0, color=color, label=stage)
    axes.invert_yaxis()
    axes.set_xlabel("ms of a decode step")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle(f"{hosts[0]['model']}, {hosts[0]['gpu']}")
    return _saved(figure, path)


def _weights_and_batch(record: dict[str, Any]) -> tuple[str, int]:
    return record.get("quant_type", record["dtype"]), record["batch"]


_STAGE_COLORS = {
    "plan": "tab:blue", "batch": "tab:cyan", "dispatch": "tab:green", "wait": "lightgrey",
    "update": "tab:purple", "text": "tab:red", "device works": "tab:orange", "idle": "black",
}  # fmt: skip


def _plot_fractions(path: Path, records: list[dict[str, Any]]) -> Path:
    from matplotlib import pyplot

    records = [r for r in records if "fraction_of_limit" in r]
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
    return _saved(figure, path)


def _saved(figure: "Figure", path: Path) -> Path:
    """Write a picture beside a file of records, and let it go."""
    from matplotlib import pyplot

    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target
