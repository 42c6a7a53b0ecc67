"""A conversion that fails, is interrupted or killed leaves things as they were."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftjax.converters import load
from swiftjax.converters.convert import convert
from swiftjax.converters.load import load_checkpoint
from swiftjax.converters.safetensors_io import open_safetensors
from swiftjax.errors import CheckpointError, UnsupportedError
from swiftjax.model import checkpoint_writer, param_files, unfinished
from swiftjax.quantization import Quantization
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


@pytest.mark.parametrize("point", ["_write_params", "write_tokenizer_files", "to_hf", "sync"])
@pytest.mark.parametrize("force", [False, True])
def test_failure_leaves_things_as_they_were(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, point: str, force: bool
) -> None:
    place = tmp_path / "native"
    if force:
        convert(source, place, dtype="bfloat16")
    before = tree(tmp_path)
    monkeypatch.setattr(unfinished if point == "sync" else checkpoint_writer, point, fail)
    with pytest.raises(CheckpointError, match=r"native cannot be written: .*No space"):
        convert(source, place, dtype=None, force=force)
    assert tree(tmp_path) == before


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed process left counts as room: it is gone on with, or replaced."""
    size = convert(source, tmp_path / "other", dtype=None).num_bytes
    left = tmp_path / ".native.partial" / "content"
    left.mkdir(parents=True)
    (left / "some").write_bytes(b"a" * 1000)
    (left.parent / "lock").touch()
    before = tree(tmp_path)
    room = {"free": size - 1001}
    monkeypatch.setattr(
        checkpoint_writer.shutil, "disk_usage", lambda path: SimpleNamespace(**room)
    )
    with pytest.raises(CheckpointError, match=r"native would take .* MiB free: make room or"):
        convert(source, tmp_path / "native", dtype=None)
    assert tree(tmp_path) == before
    room["free"] += 1
    convert(source, tmp_path / "native", dtype=None)


@pytest.fixture(scope="module")
def killed() -> dict[str, Any]:
    """What `kill_points` reports: SIGKILL at 50 random moments, 200 in the long form."""
    kills = "200" if os.environ.get("SWIFTJAX_SOAK") else "50"
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # flushes cost nothing there
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        command = [sys.executable, "-m", "tests.converters.kill_points", folder, kills, "0"]
        result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.soak
def test_p14_killed_at_random_moments_a_rerun_ends_the_same(killed: dict[str, Any]) -> None:
    """Bit for bit; a third of them replace an older checkpoint, which is never half of each."""
    assert killed["problems"] == []
    assert killed["kills"] >= (200 if os.environ.get("SWIFTJAX_SOAK") else 50)
    assert killed["continued"] >= 10  # had work of before to go on with
    names = {f"n{i}" for i in range(killed["conversions"])}
    assert set(killed["left"]) == {"hf", "old", "whole", *names}


def test_p14_full_disk_leaves_nothing(killed: dict[str, Any]) -> None:
    """A real failed write inside Orbax: the process may not make files of more than 10 kB."""
    assert "parameters cannot be written" in killed["full disk"]
    assert not [name for name in killed["left"] if "full" in name]


def test_failed_rename_restores_the_old_checkpoint(
    tmp_path: Path, source: Path, native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(tmp_path)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        return fail() if self.name == "content" else rename(self, target)  # type: ignore[return-value]

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="No space"):
        convert(source, native, dtype="bfloat16", force=True)
    assert tree(tmp_path) == before


def test_p14_broken_sources_leave_nothing(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"][0] = 70000.0
    broken = write_checkpoint(tmp_path / "broken", tiny_config(), tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 70000"):
        convert(broken, tmp_path / "native", dtype="float16")
    with pytest.raises(UnsupportedError):
        config = tiny_config() | {"model_type": "gpt2"}
        convert(write_checkpoint(tmp_path / "gpt2", config, {}), tmp_path / "native", dtype=None)
    assert sorted(os.listdir(tmp_path)) == ["broken", "gpt2"]


@pytest.mark.parametrize("name", ["a\\b", os.fsdecode(b"a\xff")])
def test_places_where_nothing_can_be_written_are_refused(
    tmp_path: Path, source: Path, name: str
) -> None:
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="has a backslash or is not UTF-8"):
        convert(source, tmp_path / name, dtype=None)
    assert tree(tmp_path) == before


class Interrupt:
    """Ends a conversion by a Ctrl-C in its middle, and counts what was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.is_on = True
        monkeypatch.setattr(param_files, "GROUP_BYTES", 20_000)
        read_rule = load.read_rule

        def counting(source: Any, rule: Any, dtype: Any) -> Any:
            self.read.append(rule.target)
            return read_rule(source, rule, dtype)

        monkeypatch.setattr(load, "read_rule", counting)

    def __call__(self, done: int, total: int) -> None:
        if self.is_on and done > total // 2:
            raise KeyboardInterrupt

    def rest(self, source: Path, place: Path, **asked: Any) -> list[str]:
        """Convert until the interrupt, then to the end: what the second run read."""
        with pytest.raises(KeyboardInterrupt):
            convert(source, place, dtype=None, progress=self)
        assert os.listdir(place.parent).count(f".{place.name}.partial") == 1 and not place.exists()
        self.read.clear()
        self.is_on = False
        convert(source, place, **{"dtype": None, "progress": self, **asked})
        assert f".{place.name}.partial" not in os.listdir(place.parent)
        return self.read


def test_interrupted_conversion_reads_only_the_rest(
    tmp_path: Path, source: Path, native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = Interrupt(monkeypatch).rest(source, tmp_path / "again")
    assert "embed.embedding" not in rest and "head.kernel" in rest and len(rest) < 10
    assert_same(
        load_checkpoint(tmp_path / "again", dtype=None), load_checkpoint(native, dtype=None)
    )


def test_interrupted_quantising_reads_only_the_rest(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix is read again unless its codes, scales and zero points are all there."""
    asked = Quantization(kind="int4", group_size=32)
    interrupt = Interrupt(monkeypatch)
    monkeypatch.setattr(param_files, "GROUP_BYTES", 4_000)  # some end right behind the codes
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "a", dtype=None, quantization=asked, progress=interrupt)
    interrupt.is_on = False
    interrupt.read.clear()
    convert(source, tmp_path / "a", dtype=None, quantization=asked)
    assert 0 < len(interrupt.read) < 12
    stored = load_checkpoint(tmp_path / "a", dtype=None)
    assert_same(stored, load_checkpoint(source, dtype=None, quantization=asked))


def move_weights_to_a_folder(source: Path) -> None:
    (source / "weights").mkdir(exist_ok=True)
    file = (source / "model.safetensors").rename(source / "weights" / "a.safetensors")
    index = {"weight_map": dict.fromkeys(open_safetensors(file), "weights/a.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("change", ["dtype", "source", "folder", "journal"])
def test_another_plan_begins_anew(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    interrupt, place = Interrupt(monkeypatch), tmp_path / "native"
    if change == "folder":
        move_weights_to_a_folder(source)
    with pytest.raises(KeyboardInterrupt):
        convert(source, place, dtype=None, progress=interrupt)
    if change == "folder":
        config, others = tiny_config(), tiny_tensors(tiny_config(), seed=5)
        other = write_checkpoint(tmp_path / "other", config, others)
        (other / "model.safetensors").rename(source / "weights" / "a.safetensors")
    if change == "source":
        write_checkpoint(source, tiny_config(), tiny_tensors(tiny_config(), seed=5))
    if change == "journal":
        (tmp_path / ".native.partial" / "journal").write_text("{]\n")
    interrupt.read.clear()
    dtype = "bfloat16" if change == "dtype" else None
    convert(source, place, dtype=dtype)
    assert "embed.embedding" in interrupt.read
    assert_same(load_checkpoint(place, dtype=None), load_checkpoint(source, dtype=dtype))


def test_two_conversions_to_one_place(tmp_path: Path, source: Path) -> None:
    (tmp_path / ".native.partial").mkdir()
    with (tmp_path / ".native.partial" / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"another process is writing .*native"):
            convert(source, tmp_path / "native", dtype=None)
    convert(source, tmp_path / "native", dtype=None)


def test_a_stranger_where_unfinished_work_is_kept(tmp_path: Path, source: Path) -> None:
    (tmp_path / ".native.partial").mkdir()
    (tmp_path / ".native.partial" / "diary").write_text("x")
    with pytest.raises(CheckpointError, match="remove it"):
        convert(source, tmp_path / "native", dtype=None)
    assert (tmp_path / ".native.partial" / "diary").read_text() == "x"
    (tmp_path / ".other.partial").symlink_to(source)
    with pytest.raises(CheckpointError, match="remove it"):
        convert(source, tmp_path / "other", dtype=None)
    assert load_checkpoint(source, dtype=None)


def test_a_replacement_that_was_cut_off_is_undone_or_finished(
    tmp_path: Path, source: Path, native: Path
) -> None:
    aside = tmp_path / ".native.old"
    native.rename(aside)  # killed before the new one came
    with pytest.raises(CheckpointError, match="exists: choose another place"):
        convert(source, native, dtype=None)
    assert not aside.exists() and load_checkpoint(native, dtype=None)
    shutil.copytree(native, aside)  # killed behind it
    with pytest.raises(CheckpointError, match="exists: choose another place"):
        convert(source, native, dtype=None)
    assert sorted(os.listdir(tmp_path)) == ["hf", "native"]
    (tmp_path / ".native.old").mkdir()  # somebody else's
    with pytest.raises(CheckpointError, match=r"\.native\.old stands where .* remove it"):
        convert(source, native, dtype="bfloat16", force=True)
    assert load_checkpoint(native, dtype=None).config.dtype == "float32"
