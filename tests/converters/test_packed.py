"""Checkpoints that others quantised: what each matrix means, and what the model says with it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from swiftjax.converters.load import load_checkpoint
from swiftjax.converters.packed.method import METHODS
from swiftjax.converters.packed.words import unpack_awq, unpack_rows
from swiftjax.converters.source import CheckpointSource, TensorInfo
from swiftjax.errors import CheckpointError
from swiftjax.quantization import Quantization
from tests.converters import packers
from tests.forward import forward_logits
from tests.numpy_llama import numpy_logits
from tests.tiny_checkpoints import Config, Tensors, tiny_config

DATA = Path(__file__).parent / "data" / "packed_by_their_libraries.npz"
IDS = list(range(2, 40))
# Both input widths are several groups of 32.
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def compressed(layout: str, weights: Mapping[str, Any], activations: Any = None) -> Config:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
FORMATS: dict[str, tuple[Config, packers.Packer, str]] = {
    "gptq asymmetric": (GPTQ, packers.gptq(), "int4"),
    "gptq symmetric": ({**GPTQ, "sym": True}, packers.gptq(symmetric=True), "int4"),
    "gptq version 2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"}, packers.gptq(version=2), "int4"
    ),
    "gptq act-order": (
        {**GPTQ, "desc_act": True}, packers.gptq(act_order=True), "int4"
    ),
    "gptq 8 bits": (
        {**GPTQ, "bits": 8, "group_size": -1, "sym": True},
        packers.gptq(8, -1, symmetric=True),
        "int8",
    ),
    "awq": (AWQ, packers.awq, "int4"),
    "compressed int4 symmetric": (
        compressed("pack-quantized", INT4), packers.compressed_int4(symmetric=True), "int4"
    ),
    "compressed int4 asymmetric": (
        compressed("pack-quantized", INT4), packers.compressed_int4(symmetric=False), "int4"
    ),
    "compressed int8 in words": (
        compressed("pack-quantized", INT8), packers.compressed_int8(packed=True), "int8"
    ),
    "compressed int8 w8a8": (
        compressed("int-quantized", INT8, DYNAMIC), packers.compressed_int8(packed=False), "w8a8"
    ),
    "compressed fp8": (
        compressed("float-quantized", FLOAT8, {**DYNAMIC, "type": "float"}),
        packers.fp8("output"),
        "fp8",
    ),
    "fp8 with one scale": ({"quant_method": "fp8"}, packers.fp8("tensor"), "fp8"),
}  # fmt: skip


class Matrix:
    """A CheckpointSource that holds the tensors of one module, `m`."""

    path = Path("matrix")
    file_dtype = None
    config: Mapping[str, Any] = {}
    generation: Mapping[str, Any] = {}

    def __init__(self, parts: Tensors) -> None:
        self.values = {f"m.{name}": np.array(values) for name, values in parts.items()}
        self.tensors = {k: TensorInfo(v.shape, v.dtype) for k, v in self.values.items()}

    def read(self, name: str) -> np.ndarray:
        return self.values[name].copy()

    def label(self, name: str) -> str:
        return name

    def tokenizer_files(self) -> Any:
        raise AssertionError


def dequantized(config: Mapping[str, Any], parts: Tensors) -> np.ndarray:
    method: Any = METHODS[config["quant_method"]](config)
    source = Matrix(parts)
    assert isinstance(source, CheckpointSource)
    assert list(method.modules(source)) == ["m"]
    method.holding(source, "m")
    return method.read(source, "m").dequantize()


def library_cases() -> dict[str, Tensors]:
    cases: dict[str, Tensors] = {}
    with np.load(DATA) as stored:
        for key in stored.files:
            case, name = key.split("/")
            cases.setdefault(case, {})[name] = stored[key]
    return cases


@pytest.mark.parametrize("case", list(library_cases()))
def test_what_their_own_libraries_packed(case: str) -> None:
    """AutoGPTQ 0.7.1, AutoAWQ 0.2.9 and compressed-tensors 0.20.1 packed, and unpacked again."""
    parts = library_cases()[case]
    expected, config = parts.pop("dequantised"), json.loads(str(parts.pop("config")))
    if "fp8" in case:
        parts["weight"] = parts["weight"].view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_allclose(dequantized(config, parts), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("word", "codes"),
    [(1985229328, list(range(8))), (-1985229329, list(range(15, 7, -1)))],
)
def test_b032_words_hold_the_lowest_code_first(word: int, codes: list[int]) -> None:
    assert unpack_rows(np.array([[word]], np.int32), 4)[0].tolist() == codes


def b032_layer(zeros: int) -> Tensors:
    return {
        "qweight": np.full((1, 8), 0x76543210, np.int32),
        "qzeros": np.array([[zeros]], np.uint32).view(np.int32),
        "scales": np.full((1, 8), 0.5, np.float16),
    }


@pytest.mark.parametrize(
    ("zeros", "config"),
    [
        (0x77777777, {"checkpoint_format": "gptq"}),
        (0x88888888, {"checkpoint_format": "gptq_v2"}),
        (0x77777777, {}),
        # A label that cannot be right: symmetric codes of 4 bits have their zero at 8.
        (0x88888888, {"checkpoint_format": "gptq", "sym": True}),
        (0x77777777, {"checkpoint_format": "gptq_v2", "sym": True}),
    ],
)
def test_b032_zero_points_of_both_versions(zeros: int, config: Config) -> None:
    found = dequantized({**GPTQ, "group_size": 8, **config}, b032_layer(zeros))
    assert found.tolist() == [[-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5]] * 8


def test_b032_symmetric_zero_points_of_no_version_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"m\.qzeros are not all 8"):
        dequantized({**GPTQ, "group_size": 8, "sym": True}, b032_layer(0x66666666))


def test_b032_a_zero_point_of_0_borrows_from_its_neighbour() -> None:
    """Version 1 is version 2 less 0x11111111 as one number; so is it undone."""
    zeros = 0x87654320 - 0x11111111
    found = dequantized({**GPTQ, "group_size": 8}, b032_layer(zeros))
    assert found[:, 0].tolist() == [-z / 2 for z in (0, 2, 3, 4, 5, 6, 7, 8)]


@pytest.mark.parametrize(
    ("word", "columns"),
    [
        (0x75316420, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0x86427531, [1, 2, 3, 4, 5, 6, 7, 8]),
        (0x76543210, [0, 4, 1, 5, 2, 6, 3, 7]),
    ],
)
def test_b034_order_of_nibbles(word: int, columns: list[int]) -> None:
    stored = np.array([[word]], np.uint32).view(np.int32)
    assert unpack_awq(stored)[0].tolist() == columns


def test_b034_zero_points_are_in_the_same_order_and_not_shifted() -> None:
    parts: Tensors = {
        "qweight": np.full((32, 1), 0x77777777, np.int32),
        "qzeros": np.full((1, 1), 0x75316420, np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    assert dequantized(AWQ, parts)[:, 0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("is_named", [True, False])
def test_compressed_tensors_may_name_the_group_of_every_input(is_named: bool) -> None:
    """A weight_g_idx of -1 everywhere means neighbours, as if there were none."""
    groups = np.arange(64) // 32
    groups = np.random.default_rng(2).permutation(groups) if is_named else groups
    values = np.random.default_rng(3).standard_normal((16, 64))
    codes, scale, zero = packers.codes_of(values, groups, 4, symmetric=True)
    parts: Tensors = {
        "weight_packed": packers.words(codes, 4, axis=1),
        "weight_scale": scale.T.astype(np.float16),
        "weight_shape": np.array(values.shape),
        "weight_g_idx": (groups if is_named else np.full(64, -1)).astype(np.int32),
    }
    wanted = (codes - zero[groups].T) * scale[groups].T
    found = dequantized(compressed("pack-quantized", INT4), parts)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def rounded_rows(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """What a format does to activations: a scale per token."""

    def rounded(x: np.ndarray) -> np.ndarray:
        largest = 448 if kind == "fp8" else 127
        scale = np.abs(x).max(axis=-1, keepdims=True) / largest
        values = x / scale
        rounded = values.astype(ml_dtypes.float8_e4m3fn) if kind == "fp8" else np.rint(values)
        return rounded.astype(np.float64) * scale

    return rounded if kind in ("fp8", "w8a8") else lambda x: x


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    quantization, packer, kind = FORMATS[name]
    config = tiny_config(**SIZES)
    plain = packers.write_packed(tmp_path / "hf", config, quantization, packer)
    loaded = load_checkpoint(tmp_path / "hf", dtype="float32")
    found = loaded.config.quantization
    group_size = 32 if kind == "int4" else 128
    assert found == Quantization(
        kind=kind,  # type: ignore[arg-type]
        group_size=group_size,
        act_order=name == "gptq act-order",
    )
    # The plain attention, which compiles fastest: what is looked at are the projections.
    logits = forward_logits(loaded.config, loaded.params, IDS, implementation="reference")
    wanted = numpy_logits(config, plain, IDS, activations=rounded_rows(kind))
    assert np.abs(logits - wanted).max() < 1e-3
