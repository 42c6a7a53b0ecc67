"""A conversion that fails, is interrupted or killed leaves things as they were."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swiftjax.converters.convert import convert
from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError, UnsupportedError
from swiftjax.model import atomic_directory, checkpoint
from tests.converters.test_convert import assert_same, tree
from tests.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hf", tiny_config(), generation={"eos_token_id": [256]})


@pytest.fixture
def native(tmp_path: Path, source: Path) -> Path:
    convert(source, tmp_path / "native", dtype=None)
    return tmp_path / "native"


def fail(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("point", ["_write_params", "write_tokenizer_files", "to_hf", "_sync"])
@pytest.mark.parametrize("force", [False, True])
def test_failure_leaves_things_as_they_were(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, point: str, force: bool
) -> None:
    place = tmp_path / "native"
    if force:
        convert(source, place, dtype="bfloat16")
    before = tree(tmp_path)
    monkeypatch.setattr(atomic_directory if point == "_sync" else checkpoint, point, fail)
    with pytest.raises(CheckpointError, match=r"native cannot be written: .*No space"):
        convert(source, place, dtype=None, force=force)
    assert tree(tmp_path) == before


FULL_DISK = """
import resource, sys
from pathlib import Path
from swiftjax.converters.convert import convert
from swiftjax.errors import CheckpointError

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    convert(Path(sys.argv[1]), Path(sys.argv[2]), dtype=None)
except CheckpointError as error:
    sys.exit(f"refused: {error}")
"""


def test_full_disk_leaves_nothing(tmp_path: Path, source: Path) -> None:
    """A real failed write inside Orbax: the process may not make files of more than 10 kB."""
    command = [sys.executable, "-c", FULL_DISK, str(source), str(tmp_path / "native")]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert "refused: parameters cannot be written" in result.stderr
    assert os.listdir(tmp_path) == ["hf"]


def test_failed_rename_restores_the_old_checkpoint(
    tmp_path: Path, source: Path, native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(tmp_path)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        return fail() if ".tmp-" in self.name else rename(self, target)  # type: ignore[return-value]

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="No space"):
        convert(source, native, dtype="bfloat16", force=True)
    assert tree(tmp_path) == before


def test_interrupt_and_broken_tensor_leave_nothing(tmp_path: Path, source: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "native", dtype=None, progress=interrupt)
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"][0] = 70000.0
    broken = write_checkpoint(tmp_path / "broken", tiny_config(), tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 70000"):
        convert(broken, tmp_path / "native", dtype="float16")
    with pytest.raises(UnsupportedError):
        config = tiny_config() | {"model_type": "gpt2"}
        convert(write_checkpoint(tmp_path / "gpt2", config, {}), tmp_path / "native", dtype=None)
    assert sorted(os.listdir(tmp_path)) == ["broken", "gpt2", "hf"]


KILL = """
import os, signal, sys
from pathlib import Path
from swiftjax.converters.convert import convert
from swiftjax.model import atomic_directory, checkpoint

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3] == "tensors":
    progress = lambda done, total: die() if done > total // 2 else None
else:
    progress = None
    setattr(atomic_directory if sys.argv[3] == "_publish" else checkpoint, sys.argv[3], die)
convert(Path(sys.argv[1]), Path(sys.argv[2]), dtype=None, progress=progress)
"""


@pytest.mark.parametrize("point", ["tensors", "to_hf", "_publish"])
def test_killed_at_any_point_leaves_no_loadable_half(
    tmp_path: Path, source: Path, point: str
) -> None:
    """After SIGKILL there is no destination, no half can be loaded, and a retry works."""
    place = tmp_path / "native"
    command = [sys.executable, "-c", KILL, str(source), str(place), point]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()[-2000:]
    assert not place.exists()
    for left in tmp_path.iterdir():
        if left != source and point != "_publish":  # by then it is whole, only not in place
            with pytest.raises(CheckpointError):
                load_checkpoint(left, dtype=None)
    convert(source, place, dtype=None)
    assert_same(load_checkpoint(place, dtype=None), load_checkpoint(source, dtype=None))
