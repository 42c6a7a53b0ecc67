"""Parse the header of a GGUF file: metadata and where each tensor lies.

Every count, length and offset is checked against the file before it is used, so a broken file costs
neither time nor memory. (The gguf package reader trusts them, and takes ten times as long.) Knows
no model and no tokenizer. Used by `gguf_source`.
"""

import math
import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from swiftjax.errors import CheckpointError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 * 2**20  # the largest vocabularies take about 15 MiB
MAX_TENSORS = 2**16
MAX_RANK = 4
DEFAULT_ALIGNMENT = 32

SCALARS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}
QUANTIZATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


class GgufTensor(NamedTuple):
    """Where a tensor lies; the shape is in numpy's order, [out, in] for matrices."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """All metadata as Python values, and the tensors by their GGUF names."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Parse and check a GGUF header.

    Raises CheckpointError naming the file for whatever is broken, UnsupportedError for a
    quantisation that cannot be read.
    """
    try:
        with path.open("rb") as file:
            return _Parser(path, file).header()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error


class _Parser:
    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path = path
        self.file = file
        self.file_size = path.stat().st_size
        self.position = 0
        self.limit = min(self.file_size, MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        if self.take(4) != MAGIC:
            raise CheckpointError(
                f"{self.path} does not begin with GGUF; of files only GGUF is read: give a "
                "directory for other formats"
            )
        if (version := self.number("<I")) not in VERSIONS:
            raise CheckpointError(
                f"{self.path} has GGUF version {version}; little-endian versions 2 and 3 are read"
            )
        num_tensors, num_keys = self.number("<Q"), self.number("<Q")
        if num_tensors > MAX_TENSORS or num_keys > self.limit:
            raise CheckpointError(
                f"{self.path} claims {num_tensors} tensors and {num_keys} metadata keys: broken"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise CheckpointError(f"{self.path} has metadata key {key!r:.200} twice")
            metadata[key] = self.value(key, self.value_type(key))
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        return GgufHeader(metadata=metadata, tensors=self.place(metadata, entries))

    def take(self, size: int) -> bytes:
        if size > self.limit - self.position:
            raise CheckpointError(
                f"{self.path}: the header asks for {size} bytes at {self.position}, past the "
                f"{self.limit} that the file or a header may have: cut short or broken"
            )
        self.position += size
        data = self.file.read(size)
        if len(data) != size:
            raise CheckpointError(f"{self.path} ended while it was read")
        return data

    def number(self, kind: str) -> int:
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode()

    def value_type(self, key: str) -> GGUFValueType:
        number = self.number("<I")
        if number not in GGUFValueType._value2member_map_:
            raise CheckpointError(f"{self.path}: metadata {key!r:.200} has unknown type {number}")
        return GGUFValueType(number)

    def value(self, key: str, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalars(SCALARS[kind], 1)[0]
        item, count = self.value_type(key), self.number("<Q")
        if item == GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: metadata {key!r:.200} is an array of arrays")
        if item != GGUFValueType.STRING:
            return self.scalars(SCALARS[item], count)
        if count > (self.limit - self.position) // 8:  # a string takes 8 bytes at least
            raise CheckpointError(f"{self.path}: metadata {key!r:.200} claims {count} strings")
        return [self.string() for _ in range(count)]

    def scalars(self, dtype: np.dtype[Any], count: int) -> list[Any]:
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape in numpy's order, quantisation number, offset in the data section."""
        name, rank = self.string(), self.number("<I")
        if rank > MAX_RANK:
            raise CheckpointError(f"{self.path}: tensor {name!r:.200} has {rank} dimensions")
        shape = tuple(self.number("<Q") for _ in range(rank))
        return name, shape[::-1], self.number("<I"), self.number("<Q")

    def place(
        self, metadata: dict[str, Any], entries: list[tuple[str, tuple[int, ...], int, int]]
    ) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r:.80}")
        start = math.ceil(self.position / alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in entries:
            where = f"{self.path}: tensor {name!r:.200}"
            if name in tensors:
                raise CheckpointError(f"{where} occurs twice")
            quantization = _quantization(where, number)
            block, block_bytes = GGML_QUANT_SIZES[quantization]
            if not shape or shape[-1] % block:
                raise CheckpointError(
                    f"{where} has shape {list(shape)}: {quantization.name} needs rows of a "
                    f"multiple of {block}"
                )
            num_bytes = math.prod(shape) // block * block_bytes
            if start + offset + num_bytes > self.file_size:
                raise CheckpointError(
                    f"{where} ends at byte {start + offset + num_bytes}; the file has only "
                    f"{self.file_size}: it is cut short, download it again"
                )
            tensors[name] = GgufTensor(shape, quantization, start + offset, num_bytes)
        return tensors


def _quantization(where: str, number: int) -> GGMLQuantizationType:
    if number not in GGMLQuantizationType._value2member_map_:
        raise CheckpointError(f"{where} has unknown type {number}")
    quantization = GGMLQuantizationType(number)
    if quantization.name not in QUANTIZATIONS:
        raise UnsupportedError(
            f"{where} is stored as {quantization.name}; GGUF files are read in "
            f"{', '.join(QUANTIZATIONS)}: take another quantisation of the model"
        )
    return quantization
