"""Read safetensors files: every byte range is checked against the file before it is trusted.

Own reader because the safetensors package cannot hand 8-bit and bfloat16 floats to numpy. Tensors
are read one at a time into fresh memory (no memory map: mapped pages would count as resident and a
file cut short while it is read would kill the process). Knows no tensor names. Used by `hf_source`.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from swiftjax.errors import CheckpointError

# The limit of the reference implementation; a header of 10,000 tensors takes about 1 MB.
MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 8

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class StoredTensor(NamedTuple):
    """Where a tensor lies: `offset` counts bytes from the start of the file.

    `strides` count elements; None means C order. (Other formats have strides, safetensors never.)
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """First byte and size: the order in which tensors lie in the file."""
        return self.offset, self.num_bytes


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Read and check the header of one file; no tensor is read.

    Raises CheckpointError for whatever is wrong with the file, naming it.
    """
    header, data_start, data_size = _read_header(path)
    tensors = {
        name: _entry(path, name, entry, data_start, data_size)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_coverage(path, tensors, data_start, data_size)
    return tensors


def read_tensor(tensor: StoredTensor) -> np.ndarray:
    """Read one tensor's values into memory of its own."""
    if tensor.strides is None or tensor.num_bytes == 0:
        data = read_bytes(tensor.path, tensor.offset, tensor.num_bytes)
        return data.view(tensor.dtype).reshape(tensor.shape)
    steps = [step * tensor.dtype.itemsize for step in tensor.strides]
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, steps, strict=True))
    data = read_bytes(tensor.path, tensor.offset, reach + tensor.dtype.itemsize)
    view = np.lib.stride_tricks.as_strided(data.view(tensor.dtype), tensor.shape, steps)
    return view.copy()


def read_bytes(path: Path, offset: int, size: int) -> np.ndarray:
    """Read `size` bytes at `offset`. Raises CheckpointError when the file has fewer."""
    try:
        data = np.fromfile(path, dtype=np.uint8, count=size, offset=offset)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if data.size != size:
        raise CheckpointError(f"{path} ended while it was read: {data.size} of {size} bytes")
    return data


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if length < 2 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(_bad_length(path, length, size))
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    return header, 8 + length, size - 8 - length


def _bad_length(path: Path, length: int, size: int) -> str:
    if length < 0:
        return f"{path} has {size} bytes, too few for a safetensors file: download it again"
    return (
        f"{path}: the safetensors header claims {length} bytes; the file has {size} and a header "
        f"at most {MAX_HEADER_BYTES}. The file is cut short or no safetensors file"
    )


def _entry(path: Path, name: str, entry: Any, data_start: int, data_size: int) -> StoredTensor:
    where = f"{path}: tensor {name!r:.200}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {dtype!r:.80}; known: {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise CheckpointError(f"{where} has the impossible shape {shape!r:.200}")
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_size:
        raise CheckpointError(
            f"{where} lies at {offsets!r:.200}, outside the {data_size} bytes of data in the "
            "file: it is cut short or broken, download it again"
        )
    tensor = StoredTensor(path, data_start + offsets[0], tuple(shape), DTYPES[dtype])
    if tensor.num_bytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where} with dtype {dtype} and shape {shape!r:.200} needs {tensor.num_bytes} bytes; "
            f"its data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return tensor


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
        for value in values
    )


def _check_coverage(
    path: Path, tensors: dict[str, StoredTensor], data_start: int, data_size: int
) -> None:
    """The format asks for tensors side by side: an overlap or a hole means broken offsets."""
    expected = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].span):
        if tensor.offset != expected:
            what = "overlaps the tensor before it" if tensor.offset < expected else "leaves a hole"
            raise CheckpointError(f"{path}: tensor {name!r:.200} {what} (bytes {tensor.offset})")
        expected += tensor.num_bytes
    if expected != data_start + data_size:
        raise CheckpointError(
            f"{path}: {data_start + data_size - expected} bytes at the end belong to no tensor"
        )
