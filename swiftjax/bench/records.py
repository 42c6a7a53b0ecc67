"""The form of result files: flat records that name the machine, the code and the command.

A file holds the newest record of each thing measured. Written by every `swiftjax bench` command.
"""

import datetime
import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_IDENTITY = (
    "workload",
    "model",
    "dtype",
    "batch",
    "context",
    "implementation",
    "rate",
    "protocol",
    "deterministic",
    "quant_type",
    "kv_cache_dtype",
    "overlap",
    "prompt_attention",
    "outputs",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One thing measured; `spread` holds the best and the worst of its rounds."""

    workload: str
    batch: int
    context: int
    value: float
    unit: str
    spread: tuple[float, float]
    limit: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What all figures of one command share."""

    model: str
    dtype: str
    command: str
    commit: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)


def make_record(figure: Figure, run: Run) -> dict[str, Any]:
    """Join a figure, its run and the machine; a limit gives the fraction that was reached."""
    import jax

    record = {**asdict(figure), **asdict(run), **run.flags}
    del record["flags"]
    record |= record.pop("details")
    record |= {
        "value": round(figure.value, 4),
        "spread": [round(x, 4) for x in figure.spread],
        "gpu": device_name(),
        "driver": driver_version(),
        "jax": jax.__version__,
        "commit": run.commit or commit(),
        "date": datetime.date.today().isoformat(),
    }
    if figure.limit is not None:
        # A time is bounded from below, a rate from above.
        is_rate = figure.unit.endswith("/s")
        fraction = figure.value / figure.limit if is_rate else figure.limit / figure.value
        record |= {"limit": round(figure.limit, 4), "fraction_of_limit": round(fraction, 3)}
    return record


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Write records, in place of older ones of the same things and beside all others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else []
    merged = {_identity(record): record for record in [*found, *records]}
    path.write_text(json.dumps(list(merged.values()), indent=1) + "\n")


def read_figures(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The records of a file by what they measured."""
    return {_identity(record): record for record in json.loads(path.read_text())}


def _identity(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in _IDENTITY)


def machine_name() -> str:
    """The folder of this machine's results: "h200" for an NVIDIA H200, "cpu" without a GPU."""
    import jax

    if jax.default_backend() != "gpu":
        return "cpu"
    return jax.devices()[0].device_kind.removeprefix("NVIDIA ").lower().replace(" ", "-")


def device_name() -> str:
    """The GPU's name, or the CPU's."""
    import jax

    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else cpu_name()


def cpu_name() -> str:
    """Model name of the CPU and how many of its cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs"


def driver_version() -> str | None:
    """Version of the NVIDIA driver, None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    words = text.split()
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


def commit() -> str | None:
    """Short hash of the code that ran; a + says that it had uncommitted changes."""
    git = ("git", "-C", str(ROOT))
    found = _output(*git, "rev-parse", "--short", "HEAD")
    changes = _output(
        *git, "status", "--short", "--untracked-files=no", "--", ":!benchmarks/results"
    )
    return found and found + ("+" if changes else "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().split("\n")[0] or None
