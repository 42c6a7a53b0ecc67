"""Conversion: bit for bit the same model, whole or not at all, whatever happens on the way."""

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftjax.converters.convert import convert
from swiftjax.converters.load import LoadedCheckpoint, load_checkpoint
from swiftjax.errors import CheckpointError
from swiftjax.hf_config import model_config_from_hf
from swiftjax.model import param_files
from swiftjax.model.config_json import to_hf
from tests.model.golden_cases import MODELS
from tests.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def assert_same(left: LoadedCheckpoint, right: LoadedCheckpoint) -> None:
    """Equal configuration, equal tokenizer, and parameters equal to the bit."""
    assert left.config == right.config
    assert left.tokenizer_files == right.tokenizer_files
    assert left.params.keys() == right.params.keys()
    for name, values in left.params.items():
        one, two = np.asarray(values), np.asarray(right.params[name])
        assert one.dtype == two.dtype and one.tobytes() == two.tobytes(), name


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hf", tiny_config(), generation={"eos_token_id": [256]})


@pytest.fixture
def native(tmp_path: Path, source: Path) -> Path:
    convert(source, tmp_path / "native", dtype=None)
    return tmp_path / "native"


@pytest.mark.parametrize("name", MODELS)
def test_config_survives(name: str) -> None:
    config = model_config_from_hf(MODELS[name][1], {"eos_token_id": [7, 8]})
    assert model_config_from_hf(json.loads(json.dumps(to_hf(config)))) == config


def test_config_of_windows_that_are_all_zero_survives() -> None:
    keys: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 9}
    config = model_config_from_hf(tiny_config("qwen2", **keys))
    assert model_config_from_hf(to_hf(config)) == config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_native_equals_the_directory(tmp_path: Path, family: str, dtype: str) -> None:
    config = tiny_config(family, torch_dtype=dtype, tie_word_embeddings=family == "qwen3")
    hf = write_checkpoint(tmp_path / "hf", config, tiny_tensors(config, dtype=dtype))
    report = convert(hf, tmp_path / "native", dtype=None)
    direct = load_checkpoint(hf, dtype=None)
    assert_same(load_checkpoint(tmp_path / "native", dtype=None), direct)
    assert report.config == direct.config and report.destination == tmp_path / "native"
    assert report.num_bytes == sum(p.nbytes for p in direct.params.values())
    assert report.num_params == sum(p.size for p in direct.params.values())


def test_dtype_is_chosen_when_converting_or_loading(tmp_path: Path, source: Path) -> None:
    expected = load_checkpoint(source, dtype="bfloat16")
    convert(source, tmp_path / "half", dtype="bfloat16")
    assert_same(load_checkpoint(tmp_path / "half", dtype=None), expected)
    convert(source, tmp_path / "whole", dtype=None)
    assert_same(load_checkpoint(tmp_path / "whole", dtype="bfloat16"), expected)
    convert(tmp_path / "whole", tmp_path / "again", dtype="bfloat16")
    assert_same(load_checkpoint(tmp_path / "again", dtype=None), expected)


def test_many_groups_and_relative_paths(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are written and read in groups; one tensor a group gives the same."""
    monkeypatch.setattr(param_files, "GROUP_BYTES", 1)
    monkeypatch.chdir(tmp_path)
    convert(Path("hf"), Path("native"), dtype=None)
    found = load_checkpoint(Path("native"), dtype=None)
    monkeypatch.undo()
    assert_same(found, load_checkpoint(source, dtype=None))
    assert_same(load_checkpoint(tmp_path / "native", dtype=None), found)


@pytest.mark.demo_model
def test_demo_model_converted_equals_the_file(demo_gguf: Path, demo_checkpoint: Path) -> None:
    direct = load_checkpoint(demo_gguf, dtype="float32")
    assert_same(load_checkpoint(demo_checkpoint, dtype=None), direct)


def test_existing_destination_is_refused(source: Path, native: Path) -> None:
    before = tree(native)
    with pytest.raises(CheckpointError, match="exists: choose another place or give --force"):
        convert(source, native, dtype="bfloat16")
    assert tree(native) == before


def test_force_replaces_a_checkpoint(tmp_path: Path, source: Path, native: Path) -> None:
    convert(source, native, dtype="bfloat16", force=True)
    assert load_checkpoint(native, dtype=None).config.dtype == "bfloat16"
    assert sorted(os.listdir(tmp_path)) == ["hf", "native"]


@pytest.mark.parametrize("kind", ["directory", "file", "link", "Hugging Face directory"])
def test_force_replaces_nothing_else(tmp_path: Path, source: Path, native: Path, kind: str) -> None:
    """--force never deletes what SwiftJAX did not write, nor follows a link."""
    place = tmp_path / "precious"
    if kind == "directory":
        place.mkdir()
        (place / "manifest.json").write_text('{"name": "a browser extension"}')
    elif kind == "file":
        place.write_text("x")
    elif kind == "link":
        place.symlink_to(native)
    else:
        shutil.copytree(source, place)
    with pytest.raises(CheckpointError, match="remove it yourself"):
        convert(source, place, dtype=None, force=True)
    assert place.exists() and load_checkpoint(native, dtype=None)


def test_destination_that_is_the_source(native: Path) -> None:
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(native, native, dtype="bfloat16", force=True)
    assert load_checkpoint(native, dtype=None)


def test_destination_without_a_parent(tmp_path: Path, source: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is no directory: create it first"):
        convert(source, tmp_path / "nowhere" / "native", dtype=None)


def test_loading_needs_little_more_than_the_model(tmp_path: Path) -> None:
    """Tensor by tensor: what numpy holds at any time stays well under twice the model."""
    config = tiny_config(
        num_hidden_layers=6, hidden_size=256, intermediate_size=768, head_dim=64, vocab_size=2000
    )
    hf = write_checkpoint(tmp_path / "hf", config)
    load_checkpoint(hf, dtype=None)  # imports and compilations are not what is measured
    tracemalloc.start()
    loaded = load_checkpoint(hf, dtype=None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = sum(p.nbytes for p in loaded.params.values())
    assert size > 20 * 2**20 and peak < 1.5 * size
