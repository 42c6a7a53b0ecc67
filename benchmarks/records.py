"""Records of benchmarks that are no `swiftjax bench` command: the same form, for a CPU."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from swiftjax.bench.records import commit as commit
from swiftjax.bench.records import cpu_name as cpu_name


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a list of flat records; what a measurement without model or GPU lacks is filled in."""
    device = {"gpu": cpu_name(), "driver": None, "jax": importlib.metadata.version("jax")}
    whole = [{"model": "none", "dtype": "none"} | device | record for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")
