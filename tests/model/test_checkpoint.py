"""The native checkpoint on disk: what is checked when it is read."""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftjax.converters.convert import convert
from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError, UnsupportedError
from swiftjax.model import manifest
from swiftjax.model.checkpoint import NativeCheckpoint, is_native
from swiftjax.model.manifest import tensor_sha256
from tests.tiny_checkpoints import tiny_config, write_checkpoint


@pytest.fixture
def native(tmp_path: Path) -> Path:
    hf = write_checkpoint(tmp_path / "hf", tiny_config(num_hidden_layers=1))
    convert(hf, tmp_path / "native", dtype=None)
    return tmp_path / "native"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_layout(native: Path) -> None:
    assert is_native(native) and not is_native(native.parent / "hf")
    names = {path.name for path in native.iterdir()}
    assert {"config.json", "manifest.json", "params", "tokenizer.json"} <= names
    written = json.loads((native / "manifest.json").read_text())
    assert written["format"] == "swiftjax" and written["format_version"] == 3
    for name, values in NativeCheckpoint(native).read():
        entry = written["params"][name]
        assert tuple(entry["shape"]) == values.shape and entry["dtype"] == values.dtype.name
        assert entry["sha256"] == tensor_sha256(values)


def param_files(native: Path) -> list[Path]:
    return [path for path in (native / "params").rglob("*") if path.is_file()]


def test_every_lost_cut_or_added_file_is_named(native: Path) -> None:
    for path in param_files(native):
        good = path.read_bytes()
        where = re.escape(str(path.relative_to(native)))
        path.write_bytes(good[:-1] if good else b"x")
        with pytest.raises(CheckpointError, match=rf"{where} has \d+ bytes of {len(good)}"):
            load_checkpoint(native, dtype=None)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{where} is lost"):
            load_checkpoint(native, dtype=None)
        path.write_bytes(good)
    assert load_checkpoint(native, dtype=None).params
    (native / "params" / "stray").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="params/stray was added"):
        load_checkpoint(native, dtype=None)


@pytest.mark.parametrize("name", ["params/00000", "tokenizer.json", "manifest.json"])
def test_links_are_refused(native: Path, name: str) -> None:
    outside = native.parent / "outside"
    (native / name).rename(outside)
    (native / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name} is a link"):
        load_checkpoint(native, dtype=None)


@pytest.mark.parametrize("name", ["config.json", "params/pipe"])
def test_pipes_are_refused_unread(native: Path, name: str) -> None:
    (native / name).unlink(missing_ok=True)
    os.mkfifo(native / name)
    with pytest.raises(CheckpointError, match=f"{name} is a pipe or a device"):
        load_checkpoint(native, dtype=None)


@pytest.mark.parametrize("name", ["config.json", "files.json"])
def test_what_is_lost_is_named_once(native: Path, name: str) -> None:
    (native / name).unlink()
    with pytest.raises(CheckpointError, match=rf"^\S+{name} cannot be read: No such file"):
        load_checkpoint(native, dtype=None)


def test_values_can_be_read_without_verifying(native: Path) -> None:
    edit(native / "manifest.json", lambda m: m["params"]["norm.scale"].update(sha256="0" * 64))
    assert "norm.scale" in dict(NativeCheckpoint(native).read(verify=False))


def test_changed_values_are_noticed(native: Path) -> None:
    """A flipped bit is refused, or was in bytes that no value depends on; never other values."""
    expected = load_checkpoint(native, dtype=None).params
    refused = 0
    data = max(param_files(native), key=lambda path: path.stat().st_size)
    good = data.read_bytes()
    for position in range(0, len(good), len(good) // 7):
        data.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        try:
            found = load_checkpoint(native, dtype=None).params
        except CheckpointError as error:
            assert str(native) in str(error)
            refused += 1
        else:
            assert all(np.array_equal(found[name], values) for name, values in expected.items())
    assert refused >= 4


def test_hash_of_another_model_is_noticed(native: Path) -> None:
    edit(native / "manifest.json", lambda m: m["params"]["norm.scale"].update(sha256="0" * 64))
    with pytest.raises(CheckpointError, match=r"norm\.scale is not what was written"):
        load_checkpoint(native, dtype=None)


def test_parameters_that_do_not_fit_are_all_listed(native: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        params = manifest["params"]
        params["layers.7.mlp.down.kernel"] = params.pop("layers.0.mlp.down.kernel")
        params["norm.scale"]["shape"] = [33]

    edit(native / "manifest.json", change)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(native, dtype=None)
    lines = str(caught.value).splitlines()
    assert "missing: layers.0.mlp.down.kernel" in lines
    assert "unexpected: layers.7.mlp.down.kernel" in lines
    assert "misshapen: norm.scale is [33], config.json asks for [32]" in lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"format_version": 2}, "version 2; 'swiftjax' version 3 is read: convert the model again"),
        ({"params": 5}, "broken"),
        ({"params": {"norm.scale": {"shape": [1], "dtype": "float32"}}}, "broken.*sha256"),
        ({"params": {"x": {"shape": [0], "dtype": "float32", "sha256": "", "group": 0}}}, "'x'"),
        ({"params": {"x": {"shape": [1], "dtype": "object", "sha256": "", "group": 0}}}, "'x'"),
        (
            {"params": {"x": {"shape": "ab", "dtype": "float32", "sha256": "", "group": 0}}},
            "broken",
        ),
        ({"params": {"x": {"shape": [1], "dtype": [], "sha256": "", "group": 0}}}, "'x'"),
        (
            {"params": {"x": {"shape": [1], "dtype": "int8", "sha256": "", "group": math.inf}}},
            "broken",
        ),
    ],
)
def test_broken_manifest(native: Path, change: dict[str, Any], message: str) -> None:
    edit(native / "manifest.json", lambda manifest: manifest.update(change))
    with pytest.raises(CheckpointError, match=rf"(?s)manifest\.json.*{message}"):
        load_checkpoint(native, dtype=None)


def test_manifest_that_asks_for_huge_memory(native: Path) -> None:
    """Shapes are compared with config.json before anything of their size is allocated."""
    edit(native / "manifest.json", lambda m: m["params"]["norm.scale"].update(shape=[2**50]))
    with pytest.raises(CheckpointError, match=r"misshapen: norm\.scale"):
        load_checkpoint(native, dtype=None)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_hidden_layers": 10**12}, CheckpointError),
        ({"hidden_size": "x"}, CheckpointError),
        ({"hidden_size": 10**30}, CheckpointError),
        ({"vocab_size": 2**40}, CheckpointError),
        ({"rope_parameters": 3}, CheckpointError),
        ({"model_type": "gpt2"}, UnsupportedError),
    ],
)
def test_broken_config(native: Path, change: dict[str, Any], error: type[Exception]) -> None:
    edit(native / "config.json", lambda config: config.update(change))
    with pytest.raises(error):
        load_checkpoint(native, dtype=None)


@pytest.mark.parametrize(
    "name", ["manifest.json", "config.json", "files.json", "tokenizer.json", "params"]
)
def test_lost_files_are_named(native: Path, name: str) -> None:
    (native / name).rename(native / "elsewhere")
    with pytest.raises(CheckpointError, match="native"):
        load_checkpoint(native, dtype=None)


def test_a_large_tensor_is_hashed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of the digests, so that it depends on every byte and on their order."""
    assert manifest.PIECE_BYTES == 2**26
    monkeypatch.setattr(manifest, "PIECE_BYTES", 8)
    values = np.arange(20, dtype=np.int8).reshape(4, 5)
    pieces = [values.tobytes()[first : first + 8] for first in (0, 8, 16)]
    digests = [hashlib.sha256(piece).digest() for piece in pieces]
    assert tensor_sha256(values) == hashlib.sha256(b"".join(digests)).hexdigest()
    assert tensor_sha256(values.T) != tensor_sha256(values)
    for size in (5, 8):
        head = values.reshape(-1)[:size]
        assert tensor_sha256(head) == hashlib.sha256(head.tobytes()).hexdigest()
