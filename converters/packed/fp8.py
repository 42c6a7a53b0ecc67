"""8-bit floats: weight [N, K] in e4m3 beside its scales: one, one per output, or one per block.

So store Hugging Face's fp8 (DeepSeek, Qwen), AutoFP8, FBGEMM and compressed-tensors. Scales per
block have no counterpart here; a static scale of the activations is not used, since every token
gets its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from swiftjax.converters.packed.coded import CodedMatrix, Holding
from swiftjax.converters.packed.parts import matrix_shape
from swiftjax.converters.source import CheckpointSource
from swiftjax.errors import CheckpointError, UnsupportedError

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_PARTS = ("weight_scale_inv", "weight_scale")  # both are multiplied by


class Fp8:
    """Implements PackedMethod for quant_method fp8 and fbgemm_fp8."""

    parts = ("weight", *SCALE_PARTS, "input_scale", "activation_scale", "input_scale_ub")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.block = read_block(config.get("weight_block_size"))

    def modules(self, source: CheckpointSource) -> Iterator[str]:
        """Names of the quantised modules."""
        return fp8_modules(source)

    def holding(self, source: CheckpointSource, module: str) -> Holding:
        """Check the shape of the scales."""
        return fp8_holding(source, module, self.block)

    def read(self, source: CheckpointSource, module: str) -> CodedMatrix:
        """Read one matrix."""
        return read_fp8(source, module, self.block)


def read_block(value: Any) -> tuple[int, int] | None:
    """Rows and columns that share a scale, as a configuration gives them."""
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) > 0:
            return rows, columns
    raise UnsupportedError(f"fp8 in blocks of {value!r:.80} is not read; two sizes are")


def fp8_modules(source: CheckpointSource) -> Iterator[str]:
    """Modules whose weight is e4m3 and has a scale."""
    for name, info in source.tensors.items():
        module = name.removesuffix(".weight")
        if module != name and info.dtype == E4M3 and _scale_part(source, module):
            yield module


def fp8_holding(source: CheckpointSource, module: str, block: tuple[int, int] | None) -> Holding:
    """Check the shape of the scales; only blocks are not held."""
    shape = matrix_shape(source, f"{module}.weight")
    scales = _scale_shape(source, module, shape, block)
    if scales[1] > 1:
        return Holding(shape=shape, kind=None, reason="fp8 with a scale per block")
    return Holding(shape=shape, kind="fp8")


def read_fp8(source: CheckpointSource, module: str, block: tuple[int, int] | None) -> CodedMatrix:
    """Read one matrix; one scale for all is repeated for every output."""
    codes = source.read(f"{module}.weight")
    grid = _scale_shape(source, module, codes.shape, block)
    scales = source.read(f"{module}.{_scale_part(source, module)}").astype(np.float32)
    height, width = (-(-size // count) for size, count in zip(codes.shape, grid, strict=True))
    if block is not None and grid not in ((1, 1), (codes.shape[0], 1)):
        height, width = block
    rows = np.arange(codes.shape[0]) // height
    return CodedMatrix(
        codes=codes,
        scale=np.ascontiguousarray(scales.reshape(grid).T[:, rows]),
        zero=None,
        groups=(np.arange(codes.shape[1]) // width).astype(np.int32),
    )


def _scale_part(source: CheckpointSource, module: str) -> str | None:
    return next((part for part in SCALE_PARTS if f"{module}.{part}" in source.tensors), None)


def _scale_shape(
    source: CheckpointSource,
    module: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
) -> tuple[int, int]:
    """Rows and columns of scales."""
    part = _scale_part(source, module)
    found = source.tensors[f"{module}.{part}"].shape
    size = int(np.prod(found))
    if size == 1:
        return 1, 1
    if size == shape[0] and found in ((size,), (size, 1)):
        return size, 1
    if block is not None:
        grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        if found == grid:
            return grid
    raise CheckpointError(
        f"{source.path}: {module}.{part} is {list(found)}, which is neither one scale nor one per "
        f"output of {list(shape)}" + (f" nor one per block of {list(block)}" if block else "")
    )
