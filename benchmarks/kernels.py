"""Kernel speeds against the device's own ceilings, as result records and a plot.

    python -m benchmarks.kernels [--out DIR] [--machine h200] [--implementation triton]
    python -m benchmarks.kernels --plot benchmarks/results/h200/kernels.json

The first form needs a GPU and writes DIR/<machine>/kernels.json; the second draws the plot beside
the records (it needs matplotlib).
"""

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def measure(machine: str, implementation: str, out: Path, commit: str | None) -> None:
    """Measure every shape, print a table and write the records."""
    import jax

    from swiftjax.kernels.measure import measure_all

    command = "python -m benchmarks.kernels " + " ".join(sys.argv[1:])
    about = {
        "gpu": jax.devices()[0].device_kind,
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "commit": commit or output("git", "rev-parse", "--short", "HEAD"),
        "command": command.strip(),
        "date": datetime.date.today().isoformat(),
    }
    records = []
    for measured in measure_all(implementation):  # type: ignore[arg-type]
        record = dataclasses.asdict(measured)
        record |= {
            "model": "llama3-8b heads",
            "dtype": "bf16",
            "fraction_of_limit": measured.value / measured.limit,
        }
        records.append(round_floats(record) | about)
        print(
            f"{measured.workload:18} B={measured.batch:<4} context={measured.context:<7}"
            f"{measured.microseconds:9.1f} us {measured.value:8.1f} {measured.unit:8}"
            f"{measured.value / measured.limit:5.0%} of {measured.limit:.0f}"
            f"  error {measured.error:.1e}",
            flush=True,
        )
    path = out / machine / "kernels.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, indent=1) + "\n")


def output(*command: str) -> str:
    """What a command prints, or "unknown" where it does not exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def round_floats(record: dict[str, Any]) -> dict[str, Any]:
    """Keep four significant digits."""

    def short(value: Any) -> Any:
        if isinstance(value, tuple):
            return [short(x) for x in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return {key: short(value) for key, value in record.items()}


def plot(path: Path) -> None:
    """Draw each shape's fraction of its ceiling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = json.loads(path.read_text())
    names = [f"{r['workload']}\nB={r['batch']}, {r['context']}" for r in records]
    figure, axes = pyplot.subplots(figsize=(10, 0.55 * len(records) + 1), layout="constrained")
    fractions = [r["fraction_of_limit"] for r in records]
    colors = ["tab:blue" if r["unit"] == "GB/s" else "tab:orange" for r in records]
    bars = axes.barh(names, fractions, color=colors)
    axes.bar_label(bars, [f"{r['value']:.0f} {r['unit']}" for r in records], padding=3)
    axes.set_xlim(0, 1.15)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    gpu = records[0]["gpu"]
    axes.set_xlabel(f"fraction of the measured ceiling, {gpu} (blue: memory, orange: tensor cores)")
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--commit", help="where git is not at hand")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.plot)
    else:
        measure(arguments.machine, arguments.implementation, arguments.out, arguments.commit)


if __name__ == "__main__":
    main()
