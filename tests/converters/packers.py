"""Pack random weights as GPTQ, AWQ, compressed-tensors and others store them, by the plain rules.

Written from the formats' tables, not from the readers. Every packer gives the tensors of a file by
their last names, and the weights that they mean.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.tiny_checkpoints import Config, Tensors, tiny_tensors, write_checkpoint

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this column of eight
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Packed(NamedTuple):
    """One matrix [outputs, inputs]: what a file stores, and its meaning."""

    parts: Tensors
    weights: np.ndarray


Packer = Callable[[np.ndarray, np.random.Generator], Packed]


def words(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Any:
    """Codes to int32 words along an axis; `order` says which of a word's codes stands where."""
    per_word = 32 // bits
    codes = np.moveaxis(codes, axis, -1)
    lines = codes.reshape(*codes.shape[:-1], -1, per_word).astype(np.uint64)
    total = np.zeros(lines.shape[:-1], np.uint64)
    for place, source in enumerate(order or range(per_word)):
        total += lines[..., source] << np.uint64(bits * place)
    return np.moveaxis(total.astype(np.uint32).view(np.int32), -1, axis)


def codes_of(
    values: np.ndarray, groups: np.ndarray, bits: int, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N K], scales and zero points [G N] by rounding; scales are float16 numbers."""
    largest, count = 2**bits - 1, groups.max() + 1
    scale, zero = np.zeros((2, count, len(values)))
    for group in range(count):
        low = np.minimum(values[:, groups == group].min(axis=1), 0)
        high = np.maximum(values[:, groups == group].max(axis=1), 0)
        width = 2 * np.maximum(-low, high) if symmetric else high - low
        scale[group] = (width / largest).astype(np.float16)
        middle = np.full(len(values), (largest + 1) // 2)
        zero[group] = middle if symmetric else np.clip(np.rint(-low / scale[group]), 1, largest)
    codes = np.clip(np.rint(values / scale[groups].T + zero[groups].T), 0, largest)
    return codes.astype(np.int64), scale, zero.astype(np.int64)


def gptq(
    bits: int = 4,
    group_size: int = 32,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    version: int = 1,
) -> Packer:
    """A packer of GPTQ; with `act_order` every matrix has groups of its own by chance."""

    def pack(values: np.ndarray, rng: np.random.Generator) -> Packed:
        width = values.shape[1]
        groups = np.arange(width) // (group_size if group_size > 0 else width)
        if act_order:
            # Of the width alone: what reads the same input has the same order.
            groups = np.random.default_rng(width).permutation(groups)
        codes, scale, zero = codes_of(values, groups, bits, symmetric=symmetric)
        parts = {
            "qweight": words(codes.T, bits, axis=0),
            "qzeros": words(zero - (version == 1), bits, axis=1),
            "scales": scale.astype(np.float16),
            "g_idx": groups.astype(np.int32),
        }
        return Packed(parts, (codes - zero[groups].T) * scale[groups].T)

    return pack


def awq(values: np.ndarray, rng: np.random.Generator) -> Packed:
    """AWQ's GEMM layout in groups of 32."""
    groups = np.arange(values.shape[1]) // 32
    codes, scale, zero = codes_of(values, groups, 4, symmetric=False)
    parts = {
        "qweight": words(codes.T, 4, axis=1, order=AWQ_COLUMNS),
        "qzeros": words(zero, 4, axis=1, order=AWQ_COLUMNS),
        "scales": scale.astype(np.float16),
    }
    return Packed(parts, (codes - zero[groups].T) * scale[groups].T)


def compressed_int4(*, symmetric: bool) -> Packer:
    """compressed-tensors' pack-quantized with 4 bits in groups of 32."""

    def pack(values: np.ndarray, rng: np.random.Generator) -> Packed:
        groups = np.arange(values.shape[1]) // 32
        codes, scale, zero = codes_of(values, groups, 4, symmetric=symmetric)
        padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
        parts = {
            "weight_packed": words(padded, 4, axis=1),
            "weight_scale": scale.T.astype(np.float16),
            "weight_shape": np.array(values.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(zero.T, 4, axis=0)
        return Packed(parts, (codes - zero[groups].T) * scale[groups].T)

    return pack


def compressed_int8(*, packed: bool) -> Packer:
    """8 bits with a scale per output, in words or as they are."""

    def pack(values: np.ndarray, rng: np.random.Generator) -> Packed:
        scale = (np.abs(values).max(axis=1, keepdims=True) / 127).astype(np.float32)
        codes = np.rint(values / scale).astype(np.int64)
        parts: Tensors = {"weight_scale": scale}
        if packed:
            parts["weight_packed"] = words(codes + 128, 8, axis=1)
            parts["weight_shape"] = np.array(values.shape)
        else:
            parts["weight"] = codes.astype(np.int8)
        return Packed(parts, codes * scale)

    return pack


def fp8(scales: str, name: str = "weight_scale", block: tuple[int, int] | None = None) -> Packer:
    """e4m3 with one scale per "tensor", "output" or "block"."""

    def pack(values: np.ndarray, rng: np.random.Generator) -> Packed:
        height, width = {
            "tensor": values.shape, "output": (1, values.shape[1]), "block": block or (1, 1)
        }[scales]  # fmt: skip
        rows, columns = (
            np.arange(n) // b for n, b in zip(values.shape, (height, width), strict=True)
        )
        scale = rng.uniform(0.5, 2, (rows[-1] + 1, columns[-1] + 1)).astype(np.float32) / 200
        spread = scale[rows][:, columns]
        codes = (values / spread).astype(ml_dtypes.float8_e4m3fn)
        stored = scale.reshape(1) if scales == "tensor" else scale
        parts = {"weight": codes, name: stored}
        return Packed(parts, codes.astype(np.float64) * spread)

    return pack


def write_packed(
    directory: Path,
    config: Config,
    quantization: Mapping[str, Any],
    packer: Packer,
    *,
    seed: int = 0,
    change: Callable[[Tensors], object] = lambda tensors: None,
) -> Tensors:
    """Write a model whose projections a packer packed; returns the tensors that it means."""
    plain = tiny_tensors(config, seed=seed)
    rng = np.random.default_rng(seed)
    stored: Tensors = {}
    for name, values in plain.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in PROJECTIONS or module == name:
            stored[name] = values
            continue
        packed = packer(values, rng)
        plain[name] = packed.weights
        stored |= {f"{module}.{part}": array for part, array in packed.parts.items()}
    change(stored)
    whole = {**config, "quantization_config": dict(quantization)}
    write_checkpoint(directory, json.loads(json.dumps(whole)), stored)
    return plain
