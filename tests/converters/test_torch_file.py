"""PyTorch's .bin without PyTorch: what torch wrote, whole models, and files that mean harm."""

import os
import pickletools
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftjax.converters.load import load_checkpoint
from swiftjax.converters.restricted_pickle import GLOBALS, OPCODES, read_state_dict
from swiftjax.converters.safetensors_io import read_tensor
from swiftjax.converters.torch_file import open_torch
from swiftjax.errors import CheckpointError, UnsupportedError
from tests.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from tests.torch_bin import as_bins, name_of, number, state_dict, tensor, text, write_bin

DATA = Path(__file__).parent / "data" / "written_by_torch.bin"
ONE = {"a": np.ones(3, np.float32)}


def test_what_torch_wrote() -> None:
    """Written by torch 2.14: views, a parameter and every type a checkpoint has."""
    found = {name: read_tensor(stored) for name, stored in open_torch(DATA).items()}
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    wanted = {
        "weight": [[1, 2, 3], [4, 5, 6]], "bias": [0.5, -0.5], "half": [1, -2, 65504],
        "brain": [[1, -2]], "transposed": base.T, "part": base[1:3, 2:5], "whole": base,
        "parameter": [7], "number": 3, "int8": [-1, 2],
    }  # fmt: skip
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(found[name].astype(np.float32), values), name
    types = {name: values.dtype.name for name, values in found.items()}
    assert types["half"] == "float16" and types["brain"] == "bfloat16"
    assert types["number"] == "int64" and types["int8"] == "int8"


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bin_loads_as_safetensors_do(tmp_path: Path, num_shards: int, dtype: str) -> None:
    config = tiny_config(torch_dtype=dtype)
    tensors = tiny_tensors(config, dtype=dtype)
    wanted = load_checkpoint(write_checkpoint(tmp_path / "a", config, tensors), dtype=None)
    as_bins(write_checkpoint(tmp_path / "b", config, tensors), tensors, num_shards)
    found = load_checkpoint(tmp_path / "b", dtype=None)
    assert found.config == wanted.config
    for name, values in wanted.params.items():
        assert np.array_equal(np.asarray(values), np.asarray(found.params[name])), name


def test_safetensors_beside_bin_are_preferred(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", tiny_config())
    (directory / "pytorch_model.bin").write_bytes(b"never opened")
    assert load_checkpoint(directory, dtype=None).params


TRAP = text("touch trap")


def harm(call: bytes) -> bytes:
    return b"\x80\x02}" + text("x") + call + b"s."


@pytest.mark.parametrize(
    ("pickled", "named"),
    [
        (harm(name_of("os", "system") + b"(" + TRAP + b"tR"), "os system"),
        (harm(name_of("builtins", "eval") + b"(" + text("open('trap', 'w')") + b"tR"), "eval"),
        (harm(name_of("torch.serialization", "load") + b")R"), "torch.serialization load"),
        (harm(name_of("torch", "FloatStorage\\n") + b")R"), "FloatStorage"),
        (harm(b"(" + TRAP + b"ios\nsystem\n"), "the opcode INST"),
        (harm(text("os") + text("system") + b"\x93" + TRAP + b"\x85R"), "STACK_GLOBAL"),
        (harm(name_of("collections", "OrderedDict") + b")\x81"), "the opcode NEWOBJ"),
        (harm(b"\x82\x01"), "the opcode EXT1"),
        (harm(b"P1\n"), "the opcode PERSID"),
        (harm(b"\x80\x04\x95" + bytes(8)), "the opcode FRAME"),
    ],
)
def test_pickles_that_could_run_code_are_refused_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pickled: bytes, named: str
) -> None:
    """Even where the harm stands behind a good state dict."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"{named}.*could run code"):
        open_torch(write_bin(tmp_path / "x.bin", ONE, pickled=pickled))
    late = state_dict(ONE)[:-1] + b"0" + pickled[2:]
    with pytest.raises(CheckpointError, match="could run code"):
        open_torch(write_bin(tmp_path / "x.bin", ONE, pickled=late))
    assert os.listdir(tmp_path) == ["x.bin"]


def test_the_short_lists_hold_nothing_that_calls() -> None:
    """A guard for who lengthens them: GLOBAL and REDUCE are checked, these would not be."""
    calling = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"}
    assert not OPCODES & (calling | {"PERSID"})
    assert {opcode.name for opcode in pickletools.opcodes} >= OPCODES
    assert all(name.split()[0] in ("collections", "torch", "torch._utils") for name in GLOBALS)


@given(st.data())
def test_broken_pickles_give_one_kind_of_error(data: st.DataObject) -> None:
    good = bytearray(state_dict({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(good) - 1))
        good[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    try:
        read_state_dict(bytes(good[:cut]), "x")
    except CheckpointError as error:
        assert str(error).startswith("x")


@pytest.mark.parametrize(
    "name", [b"torch\n_ut\\ils", b"t\\orch._utils\n_rebuild_tensor_v2", b"torch"]
)
def test_names_are_compared_as_they_are(name: bytes) -> None:
    """(In the middle one, what `pickletools` takes for an escape, and warns of.)"""
    with pytest.raises(CheckpointError, match="x asks for 't"):
        read_state_dict(b"\x80\x02c" + name + b"\n.", "x")


VIEW = tensor("0", np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"\x80\x02]" + VIEW + b"a.", "holds a list, not a dict"),
        (b"\x80\x02}" + text("step") + number(5) + b"s.", "entry step is no tensor but a int"),
        (b"\x80\x02}" + text("m") + b"}s.", "entry m is no tensor but a dict"),
        (b"\x80\x02.", "no pickled state dict"),
    ],
)
def test_other_pickles_are_refused(tmp_path: Path, pickled: bytes, message: str) -> None:
    path = write_bin(tmp_path / "x.bin", ONE, pickled=pickled)
    with pytest.raises(CheckpointError, match=message):
        open_torch(path)


def test_a_tensor_beyond_its_storage(tmp_path: Path) -> None:
    pickled = state_dict(ONE).replace(b"(" + number(3) + b"t(", b"(" + number(4) + b"t(")
    with pytest.raises(CheckpointError, match="'a' reaches beyond its storage of 3 values"):
        open_torch(write_bin(tmp_path / "x.bin", ONE, pickled=pickled))


def test_broken_archives(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "x.bin", ONE)
    good = path.read_bytes()
    for bad in (good[:-1], good[:40], b"", good[40:]):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"x\.bin"):
            open_torch(path)
    write_bin(path, ONE, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        open_torch(path)
    write_bin(path, ONE, pickled=state_dict({"a": np.ones(4, np.float32)}))
    with pytest.raises(CheckpointError, match="has 12 bytes; it should have 16"):
        open_torch(path)
    write_bin(path, {}, pickled=state_dict(ONE))
    with pytest.raises(CheckpointError, match="storage '0' is missing"):
        open_torch(path)
    write_bin(path, ONE, extra={"other/data.pkl": b""})
    with pytest.raises(CheckpointError, match=r"2 files data\.pkl"):
        open_torch(path)


@pytest.mark.parametrize(
    ("name", "format_name"),
    [("model.onnx", "ONNX"), ("saved_model.pb", "TensorFlow"), ("tf_model.h5", "Keras"),
     ("model.tflite", "TensorFlow Lite"), ("flax_model.msgpack", "Flax")],
)  # fmt: skip
def test_other_frameworks_are_refused_with_what_to_give(
    tmp_path: Path, name: str, format_name: str
) -> None:
    directory = write_checkpoint(tmp_path / "hf", tiny_config())
    (directory / "model.safetensors").rename(directory / name)
    with_config, without = directory, tmp_path / "bare"
    without.mkdir()
    (without / name).write_bytes(b"x")
    for path in (with_config, without, without / name):
        with pytest.raises(UnsupportedError, match=rf"{format_name}.*give the Hugging Face dir"):
            load_checkpoint(path, dtype=None)


def test_archives_that_would_grow_when_they_are_read(tmp_path: Path) -> None:
    """Nothing is unpacked, and sizes that the archive claims are held against the file."""
    path = tmp_path / "x.bin"
    for name in ("archive/data.pkl", "archive/byteorder"):
        write_bin(path, ONE)
        with zipfile.ZipFile(path) as archive:
            files = {info.filename: archive.read(info) for info in archive.infolist()}
        with zipfile.ZipFile(path, "w") as archive:
            for file, data in files.items():
                kind = zipfile.ZIP_DEFLATED if file == name else zipfile.ZIP_STORED
                archive.writestr(file, data, kind)
        with pytest.raises(CheckpointError, match=rf"{name}.*compressed or encrypted"):
            open_torch(path)
    whole = state_dict(ONE)
    repeated = b"(" + number(2**30) + b"t(" + number(0) + b"t"
    pickled = whole.replace(b"(" + number(3) + b"t(" + number(1) + b"t", repeated)
    with pytest.raises(CheckpointError, match=r"\[1073741824\] repeats the 3 values"):
        open_torch(write_bin(path, ONE, pickled=pickled))
    pickled = whole.replace(number(3) + b"tQ", number(2**28) + b"tQ")
    data = bytearray(write_bin(path, ONE, pickled=pickled).read_bytes())
    entry = data.rindex(b"PK\x01\x02")  # of the only storage
    data[entry + 20 : entry + 28] = 2 * (2**30).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="storage '0' ends beyond the file"):
        open_torch(path)


def test_a_key_that_takes_for_ever_to_hash() -> None:
    nested = b")" + b"q\x00h\x00\x86" * 64
    with pytest.raises(CheckpointError, match="a tuple where a str has to be"):
        read_state_dict(b"\x80\x02}" + nested + number(1) + b"s.", "x")
