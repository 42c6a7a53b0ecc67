"""Broken GGUF files: refused by name, in little time and memory, whatever byte is wrong."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swiftjax.converters.gguf_header import read_header
from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError, SwiftJaxError
from tests.tiny_checkpoints import tiny_config, tiny_tensors
from tests.tiny_gguf import write_gguf

QUIET = [HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = tiny_config(num_hidden_layers=1)
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    return write_gguf(path, config, tiny_tensors(config)).read_bytes()


def test_agrees_with_the_gguf_package(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(good)
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (found.offset, found.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert found.quantization == tensor.tensor_type
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields


@pytest.mark.demo_model
def test_agrees_with_the_gguf_package_on_the_demo_model(demo_gguf: Path) -> None:
    ours, theirs = read_header(demo_gguf), gguf.GGUFReader(demo_gguf)
    assert len(ours.tensors) == 272
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].offset == tensor.data_offset
    assert (
        ours.metadata["tokenizer.ggml.tokens"] == theirs.fields["tokenizer.ggml.tokens"].contents()
    )


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def head(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def info(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return (
        string(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


UINT8, STRING, ARRAY = 0, 8, 9
F32, Q8_0 = 0, 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "past the 0"),
        (b"GGUF", "cut short"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (head(0, 0, version=1), "version 1"),
        (head(0, 0, version=3 << 24), "little-endian"),
        (head(2**60, 0), f"{2**60} tensors"),
        (head(0, 2**60), f"{2**60} metadata keys"),
        (head(0, 1) + struct.pack("<Q", 2**62), "cut short or broken"),
        (head(0, 1) + string(b"k") + struct.pack("<I", 99), "unknown type 99"),
        (head(0, 1) + string(b"k") + struct.pack("<IIQ", ARRAY, UINT8, 2**61), "cut short"),
        (head(0, 1) + string(b"k") + struct.pack("<IIQ", ARRAY, STRING, 2**61), "strings"),
        (head(0, 1) + string(b"k") + struct.pack("<IIQ", ARRAY, ARRAY, 1), "array of arrays"),
        (head(0, 1) + string(b"\xff\xff"), "x.gguf"),
        (head(0, 2) + (string(b"k") + struct.pack("<IB", UINT8, 1)) * 2, "'k' twice"),
        (head(1, 0) + info(b"t", (2**40,), F32, 0), "has only"),
        (head(1, 0) + info(b"t", (4,), F32, 2**63), "has only"),
        (head(1, 0) + info(b"t", (1,) * 5, F32, 0), "5 dimensions"),
        (head(1, 0) + info(b"t", (), F32, 0), "shape"),
        (head(1, 0) + info(b"t", (33,), Q8_0, 0), "multiple of 32"),
        (head(1, 0) + info(b"t", (4,), 12345, 0), "unknown type 12345"),
        (head(2, 0) + info(b"t", (0,), F32, 0) * 2 + bytes(64), "occurs twice"),
    ],
)
def test_broken_headers(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "x.gguf" in str(caught.value)
    assert seconds < 2 and peak < 2**21


def test_every_shorter_file_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "x.gguf"
    for size in [*range(0, len(good), 997), len(good) - 1]:
        path.write_bytes(good[:size])
        # The writer pads the end to 32 bytes: losing padding loses nothing.
        with pytest.raises(CheckpointError, match=r"x\.gguf"):
            read_header(path)


@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
    beginning=st.booleans(),
)
def test_corrupted_bytes_never_give_another_error(
    tmp_path: Path, good: bytes, edits: list[tuple[int, int]], beginning: bool
) -> None:
    """Loading gives a model or an error of ours that names the file, never anything else."""
    data = bytearray(good)
    for position, value in edits:
        data[position % (1000 if beginning else len(data))] = value
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    try:
        load_checkpoint(path, dtype=None)
    except SwiftJaxError as error:
        assert "x.gguf" in str(error)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 3] = np.nan
    path = write_gguf(tmp_path / "x.gguf", config, tensors)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight is not finite"):
        load_checkpoint(path, dtype=None)
