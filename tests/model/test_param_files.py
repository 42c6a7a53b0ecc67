"""Groups of parameters on disk: read plainly where Orbax wrote them so, else by Orbax."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from swiftjax.errors import CheckpointError
from swiftjax.model.manifest import STORED_DTYPES
from swiftjax.model.param_files import ITEM, load_group, save_group
from swiftjax.model.zarr_array import read_stretch


def make_group() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"bias": (7,), "kernel": (40, 6), "experts": (3, 5, 2)}
    return {
        f"{name}.{dtype}": rng.integers(0, 100, shape).astype(jnp.dtype(dtype))
        for name, shape in shapes.items()
        for dtype in STORED_DTYPES
    } | {"zeros": np.zeros((9, 2), np.int8)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Where the arrays of `make_group` lie, each in a folder of its name."""
    save_group(tmp_path / "0", make_group())
    return tmp_path / "0" / ITEM


LIKES = {name: (values.shape, values.dtype.name) for name, values in make_group().items()}


def check_same(found: dict[str, np.ndarray], group: dict[str, np.ndarray]) -> None:
    assert found.keys() == group.keys()
    for name, values in group.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values, strict=True)


def test_all_that_is_written_is_read_plainly(tmp_path: Path) -> None:
    group = make_group()
    save_group(tmp_path / "0", group)
    plain = {name: read_stretch(tmp_path / "0" / ITEM / name, *like) for name, like in
             LIKES.items()}  # fmt: skip
    check_same({name: values for name, values in plain.items() if values is not None}, group)
    check_same(dict(ocp.load(str(tmp_path / "0"))), group)
    check_same(load_group(tmp_path / "0", LIKES), group)


def test_nothing_is_said_of_files_that_need_no_merging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_group(tmp_path / "0", make_group())
    assert not caplog.records


@pytest.mark.parametrize("setting", [{"use_ocdbt": True}, {"use_compression": True}])
def test_what_lies_otherwise_is_read_by_orbax(tmp_path: Path, setting: dict[str, bool]) -> None:
    group, context = make_group(), ocp.Context()
    context.array.saving.use_ocdbt = False
    for name, value in setting.items():
        setattr(context.array.saving, name, value)
    with context:
        ocp.save(str(tmp_path / "0"), group)
    for name, like in LIKES.items():
        assert read_stretch(tmp_path / "0" / ITEM / name, *like) is None
    check_same(load_group(tmp_path / "0", LIKES), group)


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    def change(described: Any) -> None:
        *path, last = keys
        for key in path:
            described = described[key]
        described[last] = value

    return change


SHARD = ("codecs", 0, "configuration")


@pytest.mark.parametrize(
    "change",
    [
        put("data_type", value="float16"),
        put("shape", value=[6, 40]),
        put("chunk_grid", "configuration", "chunk_shape", value=[20, 6]),
        put(*SHARD, "chunk_shape", value=[20, 6]),
        put(*SHARD, "index_location", value="start"),
        put(*SHARD, "codecs", value=[{"name": "bytes", "configuration": {"endian": "big"}}]),
        put(*SHARD, "codecs", value=[{"name": "transpose"}, {"name": "bytes"}]),
        put(*SHARD, "index_codecs", value=[{"name": "bytes"}]),
        put("codecs", 0, "name", value="other"),
        put("codecs", value=[]),
        put("codecs", value=5),
        put("chunk_key_encoding", value={"name": "v2"}),
        put(*SHARD, "index_codecs", 0, "configuration", "endian", value="big"),
        put("storage_transformers", value=[{"name": "other"}]),
        put("zarr_format", value=2),
        put("node_type", value="group"),
    ],
)
def test_what_is_described_otherwise_is_left_alone(
    saved: Path, change: Callable[[Any], None]
) -> None:
    folder = saved / "kernel.bfloat16"
    described = json.loads((folder / "zarr.json").read_text())
    change(described)
    (folder / "zarr.json").write_text(json.dumps(described))
    assert read_stretch(folder, *LIKES[folder.name]) is None


@pytest.mark.parametrize("text", ["[" * 15_000, '{"a": 1' + " " * 20_000 + "}", "", "\xff", "5"])
def test_descriptions_without_end_are_left_alone(saved: Path, text: str) -> None:
    folder = saved / "bias.int8"
    (folder / "zarr.json").write_text(text, encoding="latin-1")
    assert read_stretch(folder, *LIKES[folder.name]) is None


def test_no_memory_is_taken_for_files_of_another_size(saved: Path) -> None:
    folder = saved / "bias.int8"
    os.truncate(folder / "c" / "0", 2**33)  # takes no room on the disk
    assert read_stretch(folder, *LIKES[folder.name]) is None
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_group(saved.parent, {"bias.int8": ((2**60,), "float32")})


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b[:100],
                                    lambda b: b[:-20] + b"\1" + b[-19:]])  # fmt: skip
def test_files_that_are_cut_or_say_otherwise_are_left_alone(
    saved: Path, change: Callable[[bytes], bytes]
) -> None:
    folder = saved / "kernel.int8"
    file = folder / "c" / "0" / "0"
    file.write_bytes(change(file.read_bytes()))
    assert read_stretch(folder, *LIKES[folder.name]) is None
    assert read_stretch(saved / "lost", (2,), "int8") is None
