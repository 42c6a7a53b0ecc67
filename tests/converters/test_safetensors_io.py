"""The safetensors reader: exact values of every type, nothing but CheckpointError for the rest."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from swiftjax.converters.safetensors_io import DTYPES, open_safetensors, read_tensor
from swiftjax.errors import CheckpointError
from tests.tiny_checkpoints import write_safetensors


def write_raw(path: Path, header: Any, data: bytes) -> Path:
    """A file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def read_all(path: Path) -> dict[str, np.ndarray]:
    return {name: read_tensor(stored) for name, stored in open_safetensors(path).items()}


@pytest.mark.parametrize("repeat", [1, 3, 4096, 100_001])
@pytest.mark.parametrize(
    ("dtype", "data", "values"),
    [
        ("BF16", bytes.fromhex("803F00C0"), [1.0, -2.0]),
        ("F8_E4M3", bytes.fromhex("7E38"), [448.0, 1.0]),
        ("F8_E5M2", bytes.fromhex("7BBC"), [57344.0, -1.0]),
        ("F16", bytes.fromhex("FF7B003C"), [65504.0, 1.0]),
        ("F32", bytes.fromhex("0000803F000000C0"), [1.0, -2.0]),
        ("F64", struct.pack("<2d", 0.1, -3.0), [0.1, -3.0]),
    ],
)
def test_b029_values_are_exact(
    tmp_path: Path, dtype: str, data: bytes, values: list[float], repeat: int
) -> None:
    """Types numpy lacks are neither void bytes nor read as another type, at any size."""
    # One leading byte puts every other tensor at an odd address.
    header = {
        "odd": entry("U8", [1], 0, 1),
        "x": entry(dtype, [repeat, 2], 1, 1 + len(data) * repeat),
    }
    tensor = read_all(write_raw(tmp_path / "x.safetensors", header, b"\7" + data * repeat))["x"]
    assert tensor.dtype == DTYPES[dtype] and tensor.shape == (repeat, 2)
    assert np.array_equal(tensor.astype(np.float64), [values] * repeat)


def test_reads_what_the_safetensors_package_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((4,)).astype(ml_dtypes.bfloat16),
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((0, 7), np.float32),
        "int": np.arange(6, dtype=np.int64).reshape(2, 3),
        "flag": np.array([True, False]),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_all(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        assert found[name].dtype == values.dtype and np.array_equal(found[name], values)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": entry("F32", [2], 0, 8)}, b"1234567", "outside the 7 bytes"),
        ({"x": entry("F32", [3], 0, 8)}, bytes(8), "needs 12 bytes"),
        ({"x": entry("F32", [2], 8, 0)}, bytes(8), "outside"),
        ({"x": entry("F32", [-2], 0, 8)}, bytes(8), "impossible shape"),
        ({"x": entry("F32", [2**60, 2**60], 0, 8)}, bytes(8), "impossible shape"),
        ({"x": entry("F32", [True, 2], 0, 8)}, bytes(8), "impossible shape"),
        ({"x": entry("F32", [1] * 9, 0, 4)}, bytes(4), "impossible shape"),
        ({"x": entry("F4", [2], 0, 1)}, bytes(1), "'F4'"),
        ({"x": {"dtype": ["F32"], "shape": [], "data_offsets": [0, 4]}}, bytes(4), "dtype"),
        ({"x": {"dtype": "F32", "shape": [1]}}, bytes(4), "data_offsets"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4.0]}}, bytes(4), "outside"),
        ({"x": 5}, b"", "'x'"),
        (
            {"x": entry("F32", [2], 0, 8), "y": entry("F32", [2], 4, 12)},
            bytes(12),
            "'y' overlaps",
        ),
        ({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 8, 12)}, bytes(12), "hole"),
        ({"x": entry("F32", [1], 0, 4)}, bytes(9), "5 bytes at the end"),
        ([1, 2], b"", "not a JSON object"),
        (b"{ not json", b"", "not JSON"),
        (b"\xff\xfe{}", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
    ],
)
def test_broken_headers_are_named(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write_raw(tmp_path / "broken.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_safetensors(path)
    assert "broken.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [2**40, 2**63, 2**64 - 1, 1, 0])
def test_b028_header_length_is_checked_before_it_is_believed(tmp_path: Path, length: int) -> None:
    """A header length of 2^40 costs no memory."""
    path = tmp_path / "broken.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" + bytes(1000))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"broken\.safetensors"):
        open_safetensors(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("size", [0, 4, 7, 8, 9])
def test_b028_cut_to_a_few_bytes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.safetensors"
    write_safetensors(path, {"x": np.ones(3, np.float32)})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        open_safetensors(path)


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    write_safetensors(path, {"x": np.ones(300, np.float32)})
    stored = open_safetensors(path)["x"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ended while it was read"):
        read_tensor(stored)


SAMPLE = {
    "a.weight": entry("F32", [2, 3], 0, 24),
    "b.weight": entry("BF16", [4], 24, 32),
    "c.bias": entry("F8_E4M3", [0, 2], 32, 32),
}


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 60) | st.none(),
)
def test_corrupted_bytes_never_give_another_error(
    tmp_path: Path, edits: list[tuple[int, int]], cut: int | None
) -> None:
    """Any byte of the length, header or data may change: values, or CheckpointError, in no time."""
    path = write_raw(tmp_path / "x.safetensors", SAMPLE, bytes(32))
    data = bytearray(path.read_bytes())
    for position, value in edits:
        data[position % len(data)] = value
    path.write_bytes(data[: len(data) - cut] if cut else data)
    try:
        read_all(path)
    except CheckpointError as error:
        assert "x.safetensors" in str(error)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    header=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*DTYPES]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner)
            ),
            max_leaves=12,
        ),
        max_size=3,
    ),
    data=st.binary(max_size=24),
)
def test_any_json_header_never_gives_another_error(
    tmp_path: Path, header: dict[str, Any], data: bytes
) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, data)
    try:
        read_all(path)
    except CheckpointError as error:
        assert "x.safetensors" in str(error)
