"""compressed-tensors: codes of 4 or 8 bits in words along the inputs, int8 or e4m3 as they are.

What a module is follows from its own tensors; the configuration only says whether activations are
quantised too. Codes in words are stored plus half their range, the zero point of symmetric ones.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from swiftjax.converters.packed.coded import CodedMatrix, Holding, consecutive_groups, int4_holding
from swiftjax.converters.packed.fp8 import E4M3, fp8_holding, read_block, read_fp8
from swiftjax.converters.packed.parts import Part, check_parts, matrix_shape, modules_with, plain
from swiftjax.converters.packed.words import unpack_rows
from swiftjax.converters.source import CheckpointSource
from swiftjax.errors import CheckpointError, UnsupportedError
from swiftjax.quantization import QuantType

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
NAMES = {None, *FORMATS, "mixed-precision", "dense"}


class CompressedTensors:
    """Implements PackedMethod. Raises UnsupportedError for a variant that is not read."""

    parts = (
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
        "weight_g_idx", "input_scale", "input_zero_point",
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any]) -> None:
        groups = plain(config.get("config_groups"), dict, {})
        self._schemes = [plain(group, dict, {}) for group in groups.values()]
        names = {config.get("format"), *(scheme.get("format") for scheme in self._schemes)}
        if unknown := sorted(map(str, names - NAMES)):
            raise UnsupportedError(
                f"compressed-tensors in format {unknown[0]:.80} is not read; "
                f"{', '.join(FORMATS)} are"
            )
        if plain(config.get("sparsity_config"), dict, {}).get("format", "dense") != "dense":
            raise UnsupportedError("compressed-tensors with sparse weights is not read")
        if plain(config.get("transform_config"), dict, {}).get("config_groups"):
            raise UnsupportedError("compressed-tensors with transforms is not read")

    def modules(self, source: CheckpointSource) -> Iterator[str]:
        """Names of the quantised modules."""
        yield from modules_with(source, "weight_packed")
        for module in modules_with(source, "weight_scale"):
            if f"{module}.weight" in source.tensors:
                yield module

    def holding(self, source: CheckpointSource, module: str) -> Holding:
        """Check all shapes, and look up whether activations are quantised."""
        if _is_float(source, module):
            held = fp8_holding(source, module, self._block())
            if self._has_activations("float", 8):
                return held
            return Holding(shape=held.shape, kind=None, reason="fp8 weights alone")
        bits, shape = _bits_and_shape(source, module)
        num_groups = _check_scales(source, module, shape)
        if bits == 4:
            return int4_holding(shape, shape[1] // num_groups, _input_groups(source, module))
        if num_groups > 1:
            return Holding(shape=shape, kind=None, reason="8 bits in groups")
        if (_zeros(source, module, bits, (shape[0], 1)) != 128).any():
            return Holding(shape=shape, kind=None, reason="8 bits with zero points")
        kind: QuantType = "w8a8" if self._has_activations("int", bits) else "int8"
        return Holding(shape=shape, kind=kind)

    def read(self, source: CheckpointSource, module: str) -> CodedMatrix:
        """Read one matrix."""
        if _is_float(source, module):
            return read_fp8(source, module, self._block())
        bits, shape = _bits_and_shape(source, module)
        if f"{module}.weight_packed" in source.tensors:
            codes = unpack_rows(source.read(f"{module}.weight_packed"), bits)[:, : shape[1]]
        else:
            codes = source.read(f"{module}.weight").view(np.uint8) ^ np.uint8(128)
        num_groups = _check_scales(source, module, shape)
        scale = source.read(f"{module}.weight_scale").astype(np.float32)
        scale = np.broadcast_to(scale.reshape(-1, num_groups), (shape[0], num_groups))
        groups = _input_groups(source, module)
        if groups is None:
            groups = consecutive_groups(shape[1], num_groups, shape[1] // num_groups)
        return CodedMatrix(
            codes=codes,
            scale=np.ascontiguousarray(scale.T),
            zero=_zeros(source, module, bits, (shape[0], num_groups)),
            groups=groups,
        )

    def _schemes_of(self, kind: str, bits: int) -> list[dict[str, Any]]:
        weights = [(plain(x.get("weights"), dict, {}), x) for x in self._schemes]
        return [x for w, x in weights if w.get("type", "int") == kind and w.get("num_bits") == bits]

    def _has_activations(self, kind: str, bits: int) -> bool:
        found = {bool(scheme.get("input_activations")) for scheme in self._schemes_of(kind, bits)}
        if len(found) > 1:
            raise UnsupportedError(
                f"compressed-tensors with activations quantised in some {kind}{bits} modules only "
                "is not read"
            )
        return found == {True}

    def _block(self) -> tuple[int, int] | None:
        schemes = self._schemes_of("float", 8)
        blocks = (plain(x.get("weights"), dict, {}).get("block_structure") for x in schemes)
        return read_block(next((block for block in blocks if block), None))


def _is_float(source: CheckpointSource, module: str) -> bool:
    weight = source.tensors.get(f"{module}.weight")
    return weight is not None and weight.dtype == E4M3


def _bits_and_shape(source: CheckpointSource, module: str) -> tuple[int, tuple[int, int]]:
    """Bits of a code, and [outputs, inputs] of the weight."""
    if f"{module}.weight_packed" not in source.tensors:
        shape = matrix_shape(source, f"{module}.weight")
        check_parts(source, module, {"weight": Part(shape, "i")}, "an integer format")
        if source.tensors[f"{module}.weight"].dtype != np.int8:
            raise CheckpointError(f"{source.path}: {module}.weight has a scale but is not int8")
        return 8, shape
    num_outputs, num_words = matrix_shape(source, f"{module}.weight_packed")
    parts = {"weight_packed": Part((num_outputs, num_words), "i"), "weight_shape": Part((2,), "i")}
    check_parts(source, module, parts, "packed weights")
    shape = tuple(source.read(f"{module}.weight_shape").tolist())
    for bits in (4, 8):
        if shape == (num_outputs, shape[1]) and num_words == -(-shape[1] * bits // 32):
            return bits, shape
    raise CheckpointError(
        f"{source.path}: {module}.weight_packed is {[num_outputs, num_words]}, which does not hold "
        f"{list(shape)} codes of 4 or 8 bits"
    )


def _check_scales(source: CheckpointSource, module: str, shape: tuple[int, int]) -> int:
    """The number of groups of inputs, by the shape of the scales."""
    found = source.tensors.get(f"{module}.weight_scale")
    if found is not None and found.dtype.kind in "fV":
        if found.shape in ((), (1,), (1, 1), (shape[0],), (shape[0], 1)):
            return 1
        rows, groups = found.shape if len(found.shape) == 2 else (0, 0)
        if rows == shape[0] and groups > 0 and shape[1] % groups == 0:
            return groups
    raise CheckpointError(
        f"{source.path}: {module}.weight_scale is "
        f"{list(found.shape) if found else 'missing'}, which fits no weight of {list(shape)}"
    )


def _input_groups(source: CheckpointSource, module: str) -> Int32[np.ndarray, " K"] | None:
    """The group of every input where a file names them; -1 everywhere means that it does not."""
    if f"{module}.weight_g_idx" not in source.tensors:
        return None
    _, shape = _bits_and_shape(source, module)
    check_parts(source, module, {"weight_g_idx": Part((shape[1],), "i")}, "these weights")
    groups = source.read(f"{module}.weight_g_idx").astype(np.int32)
    if (groups == -1).all():
        return None
    num_groups = _check_scales(source, module, shape)
    if not 0 <= groups.min() <= groups.max() < num_groups:
        raise CheckpointError(
            f"{source.path}: {module}.weight_g_idx names groups {groups.min()} to "
            f"{groups.max()}; there are {num_groups}"
        )
    return groups


def _zeros(
    source: CheckpointSource, module: str, bits: int, shape: tuple[int, int]
) -> UInt8[np.ndarray, "G N"]:
    """Zero points as codes are stored; `shape` is [outputs, groups]."""
    middle = 1 << (bits - 1)
    if f"{module}.weight_zero_point" not in source.tensors:
        return np.full(shape[::-1], middle, np.uint8)
    stored = source.read(f"{module}.weight_zero_point")
    if stored.dtype == np.int32:  # in words along the outputs
        check_parts(
            source,
            module,
            {"weight_zero_point": Part((-(-shape[0] * bits // 32), shape[1]), "i")},
            f"{bits} bits",
        )
        return unpack_rows(np.ascontiguousarray(stored.T), bits)[:, : shape[0]]
    if stored.dtype != np.int8 or stored.size not in (1, shape[0] * shape[1]):
        raise CheckpointError(
            f"{source.path}: {module}.weight_zero_point is {stored.dtype.name} "
            f"{list(stored.shape)}; int8 {list(shape)} is read"
        )
    zero = np.broadcast_to(stored.reshape(-1, shape[1] if stored.size > 1 else 1), shape)
    return np.ascontiguousarray((zero.T.astype(np.int16) + middle).astype(np.uint8))
