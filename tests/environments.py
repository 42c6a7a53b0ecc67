"""Environments of their own for other people's packages, made from PyPI by uv and kept.

uv takes seconds where pip takes minutes, but does not know pip's settings, which some networks
need: where it fails pip does it. What an environment was made of is in the name of a file in it, so
that another list of packages makes it anew.
"""

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def programs_of(name: str, *packages: str) -> Path:
    """The folder of executables of environment `.venv-NAME`, which has these packages.

    Options of `pip install` that uv has too may stand among them.
    """
    folder = ROOT / f".venv-{name}"
    made_of = hashlib.sha256("\n".join((sys.version, *packages)).encode()).hexdigest()[:16]
    mark = folder / f"made-of-{made_of}"
    with (ROOT / f".venv-{name}.lock").open("w") as lock:
        # Another process of the same run may want it, too.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            _make(folder, packages)
            mark.touch()
    return folder / "bin"


def _make(folder: Path, packages: tuple[str, ...]) -> None:
    python = str(folder / "bin" / "python")
    _run("uv", "--quiet", "venv", "--clear", "--seed", "--python", sys.executable, str(folder))
    try:
        _run("uv", "--quiet", "pip", "install", "--python", python, *packages)
    except AssertionError:
        _run("pip", "--quiet", "--python", python, "install", *packages)


def _run(module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{module} {' '.join(arguments)}:\n{done.stderr[-2000:]}"
