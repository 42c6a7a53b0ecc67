"""What the bench commands share: reading options; printing, writing and comparing figures."""

import shlex
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swiftjax.config import KVCacheDtype
from swiftjax.errors import InvalidRequestError
from swiftjax.model_config import Dtype

if TYPE_CHECKING:
    from swiftjax.bench.limits import Peaks
    from swiftjax.bench.records import Figure, Run

# workload -> name of its result file
FILES = {
    "W1": "latency",
    "W2": "prefill",
    "W3": "throughput",
    "long": "long_context",
    "memory": "memory",
    "idle": "idle",
}


def check_known(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidRequestError for names that there are not."""
    if unknown := set(names) - set(known):
        raise InvalidRequestError(
            f"{what} {', '.join(sorted(unknown))} is unknown; choose from {', '.join(known)}"
        )


def given(**options: Any) -> dict[str, Any]:
    """Options that were given, for a record to name."""
    return {name: value for name, value in options.items() if value is not None}


def flags_of(**options: Any) -> list[str]:
    """The same as arguments of another command."""
    pairs = given(**options).items()
    return [x for name, value in pairs for x in (f"--{name.replace('_', '-')}", str(value))]


def stored_type(kv_cache_dtype: KVCacheDtype) -> KVCacheDtype | None:
    """What a record says of the KV cache: nothing of the model's own type."""
    return None if kv_cache_dtype == "auto" else kv_cache_dtype


def compare_files(a: Path, b: Path) -> None:
    """Print the figures that both files have, and the second over the first."""
    from swiftjax.bench.records import read_figures

    before, after = read_figures(a), read_figures(b)
    for key in [key for key in before if key in after]:
        old, new = before[key], after[key]
        typer.echo(
            f"{old['workload']:14} {old['batch']:>4} x {old['context']:<6} {old['value']:10.4g} "
            f"{new['value']:10.4g} {old['unit']:8} x{new['value'] / old['value']:.3f}"
        )


def read_peaks() -> "Peaks | None":
    """The best known speeds of this device, None where they are not known."""
    from swiftjax.bench.limits import PEAKS
    from swiftjax.bench.records import device_name

    return PEAKS.get(device_name())


def run_of(
    dtype: Dtype | None, model: str, commit: str | None, implementation: str | None
) -> "Run":
    """What the records of this command share; `commit` is asked of git where it is None."""
    from swiftjax.bench.records import Run

    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    command = shlex.join(["swiftjax", *_without(sys.argv[1:], ("--out", "--commit"))])
    flags: dict[str, Any] = {} if implementation is None else {"implementation": implementation}
    return Run(
        model=model, dtype=short[dtype or "float32"], command=command, commit=commit, flags=flags
    )


def _without(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """Leave out options that say where to write, not what to measure."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in names:
            next(rest, None)
        elif not argument.startswith(tuple(f"{name}=" for name in names)):
            kept.append(argument)
    return kept


def report(figures: Iterable["Figure"], run: "Run", out: Path | None, name: str) -> None:
    """Print every figure as it comes, then write all of them."""
    from swiftjax.bench.records import machine_name, make_record, write_records

    records = []
    for figure in figures:
        record = make_record(figure, run)
        records.append(record)
        share = record.get("fraction_of_limit")
        best = "" if share is None else f"  ({share:.0%} of the limit, {record['limit']:g})"
        spread = "..".join(f"{x:.4g}" for x in figure.spread)
        typer.echo(
            f"{figure.workload:8} {figure.batch:>4} x {figure.context:<6} "
            f"{figure.value:10.4g} {figure.unit}  [{spread}]{best}"
        )
    if out is not None:
        path = out / machine_name() / f"{FILES.get(name, name)}.json"
        write_records(path, records)
        typer.echo(f"written to {path} at {time.strftime('%H:%M:%S')}")
