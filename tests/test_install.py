"""`pip install .`: the wheel holds what the links point to, and works away from the sources."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("swiftjax", "kernels", "converters", "serving", "pyproject.toml", "README.md", "LICENSE")
IMPORTS = (
    "swiftjax.kernels",
    "swiftjax.converters.convert",
    "swiftjax.serving.client",
    "swiftjax.serving.http.http_server",
    "swiftjax.api",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SwiftJAX alone, installed from a copy: building in the sources would leave files there."""
    folder = tmp_path_factory.mktemp("install")
    for name in SOURCES:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
        else:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(target), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return target


def run_elsewhere(site: Path, tmp_path: Path, code: str, *args: str) -> str:
    """Run Python in another directory, with the installed copy before any other."""
    first = f"import sys; sys.path.insert(0, {str(site)!r}); {code}"
    command = [sys.executable, "-P", "-c", first, *args]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


def test_installed_copy_is_whole(site: Path, tmp_path: Path) -> None:
    assert (site / "swiftjax" / "kernels" / "__init__.py").is_file()
    assert not (site / "swiftjax" / "kernels").is_symlink()
    assert (site / "swiftjax" / "serving" / "proto" / "swiftjax.proto").is_file()
    assert not (site / "kernels").exists()
    code = f"import {', '.join(IMPORTS)}; print(swiftjax.kernels.__file__)"
    assert run_elsewhere(site, tmp_path, code).startswith(str(site))


def test_installed_command_line_runs(site: Path, tmp_path: Path) -> None:
    code = "from swiftjax.cli import main; main()"
    assert run_elsewhere(site, tmp_path, code, "--version").startswith("swiftjax ")
    assert "--policy" in run_elsewhere(site, tmp_path, code, "serve", "--help")
