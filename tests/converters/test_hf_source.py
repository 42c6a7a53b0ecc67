"""Hugging Face directories that are broken: each is refused with the name of what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftjax.converters.hf_source import HfSource, read_configs
from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError, UnsupportedError
from tests.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint, write_safetensors

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good checkpoint in two shards."""
    return write_checkpoint(tmp_path / "model", tiny_config(), num_shards=2)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def load(directory: Path) -> dict[str, np.ndarray]:
    loaded = load_checkpoint(directory, dtype=None)
    return {name: np.asarray(values) for name, values in loaded.params.items()}


def test_shards_and_single_file_load_the_same(tmp_path: Path, sharded: Path) -> None:
    single = write_checkpoint(tmp_path / "single", tiny_config())
    left, right = load(sharded), load(single)
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)


def test_b028_missing_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND}' does not exist"):
        load(sharded)


@pytest.mark.parametrize("keep", [slice(None, -1), slice(None, 4), slice(0)])
def test_b028_truncated_shard(sharded: Path, keep: slice) -> None:
    (sharded / SECOND).write_bytes((sharded / SECOND).read_bytes()[keep])
    with pytest.raises(CheckpointError, match=SECOND):
        load(sharded)


def test_b028_huge_header(sharded: Path) -> None:
    data = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes((2**40).to_bytes(8, "little") + data[8:])
    with pytest.raises(CheckpointError, match=f"{SECOND}.*{2**40} bytes"):
        load(sharded)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "sub/../../x.safetensors", "/x.safetensors", ""]
)
def test_p14_b028_index_entry_that_leads_out(sharded: Path, file: str) -> None:
    """A shard outside the directory is not read even though it exists and holds the tensor."""
    outside = sharded.parent / "x.safetensors"
    write_safetensors(outside, {"model.norm.weight": np.ones(32, np.float32)})
    file = str(outside) if file.startswith("/") else file
    (sharded / "sub").mkdir()
    edit_json(
        sharded / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": file})
    )
    with pytest.raises(CheckpointError, match="leads out of the checkpoint directory"):
        load(sharded)


@pytest.mark.parametrize("file", ["x" * 5000, "\ud800", "sub", "model.safetensors/x", "."])
def test_index_entry_that_is_no_file(sharded: Path, file: str) -> None:
    (sharded / "sub").mkdir()
    edit_json(
        sharded / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": file})
    )
    with pytest.raises(CheckpointError, match="does not exist"):
        load(sharded)


def test_manifest_of_another_tool_beside_the_weights(sharded: Path) -> None:
    (sharded / "manifest.json").write_text("{}")
    assert load(sharded)


@pytest.mark.parametrize("name", [SECOND, "config.json", INDEX, "tokenizer.json"])
def test_p14_b028_link_that_leads_out(sharded: Path, name: str) -> None:
    outside = sharded.parent / "outside"
    (sharded / name).rename(outside)
    (sharded / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name} is a link to .*outside"):
        load(sharded)


def test_links_of_the_hugging_face_cache_are_followed(sharded: Path) -> None:
    """There every file of snapshots/REVISION is a link into blobs."""
    hub = sharded.parent / "hub"
    (hub / "blobs").mkdir(parents=True)
    snapshot = hub / "snapshots" / "abc"
    shutil.move(sharded, snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        shutil.move(path, hub / "blobs" / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    assert "model.norm.weight" in HfSource(snapshot, read_configs(snapshot)).tensors
    assert load(snapshot)


def test_b028_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load(tmp_path)


def test_directory_that_holds_only_gguf(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"give the path of model-q4\.gguf itself"):
        load(tmp_path)


def test_file_that_is_no_gguf(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="of files only GGUF is read: give a directory"):
        load(sharded / SECOND)


def test_b028_no_weights(sharded: Path) -> None:
    for path in sharded.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no weights that are read"):
        load(sharded)
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no zip archive"):
        load(sharded)


def test_b028_stray_file_is_ignored(sharded: Path) -> None:
    """Neither an extra model.safetensors nor an extra shard is merged in."""
    good = load(sharded)
    stray = tiny_tensors(tiny_config(), seed=9)
    write_safetensors(sharded / "model.safetensors", stray)
    write_safetensors(sharded / "model-00003-of-00002.safetensors", stray | {"x": np.ones(1)})
    again = load(sharded)
    assert all(np.array_equal(good[name], again[name]) for name in good)


def test_b028_tensor_in_the_index_but_in_no_shard(sharded: Path) -> None:
    """All of them are listed, and so are the tensors that the index lacks."""

    def edit(index: dict[str, Any]) -> None:
        index["weight_map"] |= {"ghost.one": SECOND, "ghost.two": SECOND}
        del index["weight_map"]["model.norm.weight"]

    edit_json(sharded / INDEX, edit)
    with pytest.raises(CheckpointError) as caught:
        load(sharded)
    assert "'ghost.one'" in str(caught.value) and "'ghost.two'" in str(caught.value)
    assert f"{SECOND} holds tensor 'model.norm.weight', which the index lacks" in str(caught.value)


def test_b028_several_broken_shards_are_all_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    (sharded / "model-00001-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"(?s)model-00001.*model-00002"):
        load(sharded)


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"x": 5}}', '{"weight_map": 7}'],
)
def test_broken_index(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(sharded)


def test_b028_parameter_missing_from_all_shards(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    directory = write_checkpoint(tmp_path / "model", tiny_config(), tensors, num_shards=2)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(directory)


def test_b028_gptq_copy_that_does_not_say_so(tmp_path: Path) -> None:
    """Without its configuration it is not guessed at; `test_packed_loading` has the good ones."""
    config = tiny_config()
    tensors = tiny_tensors(config)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.qweight"] = np.zeros((4, 48), np.int32)
    directory = write_checkpoint(tmp_path / "model", config, tensors, num_shards=2)
    with pytest.raises(
        CheckpointError, match=r"unexpected: model\.layers\.0\.mlp\.up_proj\.qweight"
    ):
        load(directory)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "gpt2"}, UnsupportedError, "gpt2"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2}}, UnsupportedError, "'su'"),
        ({"hidden_size": -1}, CheckpointError, "hidden_size"),
        ({"num_attention_heads": None}, CheckpointError, "num_attention_heads"),
        ({"rope_scaling": [1]}, CheckpointError, "model"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, CheckpointError, "factor"),
        ({"eos_token_id": ["x"]}, CheckpointError, "model"),
        ({"num_hidden_layers": 10**12}, CheckpointError, "1000000000000 layers"),
        ({"dtype": "int4"}, UnsupportedError, "int4"),
    ],
)
def test_broken_configuration(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    directory = write_checkpoint(tmp_path / "model", tiny_config())
    edit_json(directory / "config.json", lambda config: config.update(change))
    with pytest.raises(error, match=message):
        load(directory)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_files_that_are_not_json(tmp_path: Path, name: str, text: str) -> None:
    directory = write_checkpoint(tmp_path / "model", tiny_config(), generation={})
    (directory / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=name):
        load(directory)


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / ("x" * 5000))
    with pytest.raises(CheckpointError, match="nowhere does not exist; give"):
        load(tmp_path / "nowhere")


def test_an_unknown_architecture_is_named_though_there_are_no_weights(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", tiny_config())
    (directory / "model.safetensors").unlink()
    edit_json(
        directory / "config.json",
        lambda config: config.update(model_type="mamba", architectures=["MambaForCausalLM"]),
    )
    with pytest.raises(UnsupportedError, match="'mamba'"):
        load(directory)
