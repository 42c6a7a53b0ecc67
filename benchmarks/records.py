"""What every benchmark's records share: the machine, the commit, the file form."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from typing import Any


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a list of flat records; what a measurement without model or GPU lacks is filled in."""
    device = {"gpu": cpu_name(), "driver": None, "jax": importlib.metadata.version("jax")}
    whole = [{"model": "none", "dtype": "none"} | device | record for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


def cpu_name() -> str:
    """Model name of the CPU and how many of them this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs"


def commit() -> str:
    """Short hash of the code that ran; a + says that it had uncommitted changes."""
    changes = git("status", "--short", "--untracked-files=no", "--", ":!benchmarks/results")
    return git("rev-parse", "--short", "HEAD") + ("+" if changes else "")


def git(*args: str) -> str:
    """Output of a git command in this repository, '' outside one."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent.parent), *args], capture_output=True, text=True
    )
    return done.stdout.strip()
