"""Quantised checkpoints of others: what stays quantised, what is dequantised, what is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftjax.converters.convert import convert
from swiftjax.converters.load import LoadedCheckpoint, load_checkpoint
from swiftjax.errors import CheckpointError, InvalidRequestError, UnsupportedError
from swiftjax.kernels import packed_int4
from swiftjax.quantization import Quantization
from tests.converters import packers
from tests.converters.test_packed import AWQ, FLOAT8, FORMATS, GPTQ, INT8, compressed
from tests.tiny_checkpoints import Config, Tensors, tiny_config

# 64 inputs are two groups of 32, 384 are three of 128.
WIDE = {
    "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 384
}  # fmt: skip
MODULE = "model.layers.0.mlp.down_proj"


def meaning(loaded: LoadedCheckpoint) -> dict[str, np.ndarray]:
    """Every kernel [inputs, outputs] as float32, whatever it is stored in."""
    quantization = loaded.config.quantization
    found = {}
    for name, kernel in loaded.params.items():
        if not name.endswith(".kernel"):
            continue
        scale, zero = (loaded.params.get(f"{name}_{part}") for part in ("scale", "zero"))
        if scale is None:
            values = np.asarray(kernel, np.float32)
        elif zero is None:
            values = np.asarray(kernel, np.float32).T * np.asarray(scale)
        else:
            assert quantization is not None
            order = loaded.params.get(f"{name}_order")
            width = 384 if name.endswith("down.kernel") else 64
            stored = packed_int4.dequantize(
                kernel, scale, zero, num_inputs=width, group_size=quantization.group_size
            )
            values = np.asarray(stored).T
            if order is not None:
                values = values[np.argsort(np.asarray(order))]
        found[name] = values
    return found


def check(directory: Path, plain: Tensors) -> LoadedCheckpoint:
    """Load it, and compare one kernel of each sort with what the packer says it means."""
    loaded = load_checkpoint(directory, dtype="float32")
    found, prefix = meaning(loaded), "model.layers.0"
    for ours, theirs in (
        ("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("attention.output", ("self_attn.o_proj",)),
        ("mlp.gate_up", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.down", ("mlp.down_proj",)),
    ):
        wanted = np.concatenate([plain[f"{prefix}.{name}.weight"] for name in theirs])
        np.testing.assert_allclose(found[f"layers.0.{ours}.kernel"], wanted.T, atol=1e-6)
    return loaded


def write(directory: Path, quantization: Config, packer: packers.Packer, **keys: Any) -> Tensors:
    return packers.write_packed(directory, tiny_config(**WIDE), quantization, packer, **keys)


@pytest.mark.parametrize(
    ("group_size", "held"), [(32, 32), (64, 64), (192, 64), (384, 128), (-1, 128)]
)
def test_large_groups_are_cut_into_ours(tmp_path: Path, group_size: int, held: int) -> None:
    """A matrix that is one group takes the size of the others."""
    quantization = {**GPTQ, "group_size": group_size}
    plain = write(tmp_path / "hf", quantization, packers.gptq(group_size=group_size))
    loaded = check(tmp_path / "hf", plain)
    assert loaded.config.quantization is not None
    form = loaded.config.weight_format("layers.0.mlp.down")
    assert form is not None and form.group_size == held


BLOCK = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}
WEIGHTS_ONLY = compressed("float-quantized", FLOAT8)
GROUPED = {**INT8, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("quantization", "packer", "reason"),
    [
        (BLOCK, packers.fp8("block", "weight_scale_inv", (16, 32)), "a scale per block"),
        (WEIGHTS_ONLY, packers.fp8("output"), "fp8 weights alone"),
        ({**GPTQ, "bits": 8}, packers.gptq(8), "8 bits in groups"),
        ({**GPTQ, "bits": 8, "group_size": -1}, packers.gptq(8, -1), "8 bits with zero points"),
        ({**GPTQ, "group_size": 16}, packers.gptq(group_size=16), "groups of 16 inputs"),
    ],
)
def test_what_no_format_holds_is_dequantised_and_said_so(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    quantization: Config,
    packer: packers.Packer,
    reason: str,
) -> None:
    plain = write(tmp_path / "hf", quantization, packer)
    with caplog.at_level(logging.WARNING):
        loaded = check(tmp_path / "hf", plain)
    assert loaded.config.quantization is None
    assert "4 of 5 projections are dequantised" in caplog.text and reason in caplog.text
    # What is plain again can be quantised anew.
    again = load_checkpoint(tmp_path / "hf", dtype=None, quantization=Quantization(kind="int8"))
    assert again.config.quantization == Quantization(kind="int8")


def test_a_scale_per_output_where_blocks_are_named(tmp_path: Path) -> None:
    plain = write(tmp_path / "hf", BLOCK, packers.fp8("output", "weight_scale_inv"))
    assert check(tmp_path / "hf", plain).config.quantization is not None


def test_an_order_of_zeros_is_none(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            tensors[name] = np.zeros_like(tensors[name])

    plain = write(tmp_path / "hf", GPTQ, packers.gptq(), change=change)
    config = check(tmp_path / "hf", plain).config
    assert config.quantization is not None and not config.quantization.act_order


def test_parts_that_differ_are_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """q, k and v become one matrix, which has one order of inputs; here k has another."""

    def change(tensors: Tensors) -> None:
        name = "model.layers.0.self_attn.k_proj"
        packed = packers.gptq(act_order=True)(original, np.random.default_rng(0))
        groups = packed.parts["g_idx"]
        codes, scale, zero = packers.codes_of(original, groups[::-1], 4, symmetric=False)
        tensors[f"{name}.g_idx"] = groups[::-1].copy()
        tensors[f"{name}.qweight"] = packers.words(codes.T, 4, axis=0)
        tensors[f"{name}.qzeros"] = packers.words(zero - 1, 4, axis=1)
        tensors[f"{name}.scales"] = scale.astype(np.float16)
        meant[f"{name}.weight"] = (codes - zero[groups[::-1]].T) * scale[groups[::-1]].T

    meant: Tensors = {}
    original = np.random.default_rng(1).standard_normal((16, 64))
    quantization = {**GPTQ, "desc_act": True}
    plain = write(tmp_path / "hf", quantization, packers.gptq(act_order=True), change=change)
    with caplog.at_level(logging.WARNING):
        loaded = check(tmp_path / "hf", plain | meant)
    assert "1 of 5 projections are dequantised" in caplog.text
    assert "parts quantised differently" in caplog.text
    keep = ("layers.0.attention.qkv", "head")
    assert loaded.config.quantization == Quantization(
        kind="int4", group_size=32, keep=keep, act_order=True
    )


def test_modules_that_were_left_alone_stay_so(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for part in packers.gptq()(np.ones((8, 32)), np.random.default_rng(0)).parts:
            del tensors[f"{MODULE}.{part}"]
        tensors[f"{MODULE}.weight"] = weights

    weights = np.random.default_rng(3).standard_normal((64, 384)).astype(np.float32)
    plain = write(tmp_path / "hf", GPTQ, packers.gptq(), change=change)
    loaded = check(tmp_path / "hf", plain | {f"{MODULE}.weight": weights})
    assert loaded.config.quantization == Quantization(
        kind="int4", group_size=32, keep=("layers.0.mlp.down", "head")
    )


@pytest.mark.parametrize("name", ["gptq act-order", "awq", "compressed fp8"])
def test_native_equals_the_file(tmp_path: Path, name: str) -> None:
    quantization, packer, _ = FORMATS[name]
    write(tmp_path / "hf", quantization, packer)
    convert(tmp_path / "hf", tmp_path / "native", dtype=None)
    direct = load_checkpoint(tmp_path / "hf", dtype=None)
    stored = load_checkpoint(tmp_path / "native", dtype=None)
    assert stored.config == direct.config and stored.params.keys() == direct.params.keys()
    for key, values in direct.params.items():
        assert np.asarray(values).tobytes() == np.asarray(stored.params[key]).tobytes(), key
    with pytest.raises(InvalidRequestError, match="quantised already"):
        load_checkpoint(tmp_path / "hf", dtype=None, quantization=Quantization(kind="int4"))


def test_biases_of_zeros_and_scales_of_the_cache_are_no_surprise(tmp_path: Path) -> None:
    extra = {
        f"{MODULE}.bias": np.zeros(64, np.float16),
        "model.layers.0.self_attn.k_scale": np.ones(1, np.float32),
    }
    plain = write(tmp_path / "hf", GPTQ, packers.gptq(), change=lambda t: t.update(extra))
    check(tmp_path / "hf", plain)
    extra[f"{MODULE}.bias"][3] = 1
    write(tmp_path / "hf", GPTQ, packers.gptq(), change=lambda t: t.update(extra))
    with pytest.raises(CheckpointError, match=rf"unexpected: {MODULE}\.bias"):
        load_checkpoint(tmp_path / "hf", dtype=None)


def test_configuration_in_a_file_of_its_own(tmp_path: Path) -> None:
    """So wrote AutoGPTQ before config.json had a place for it."""
    plain = write(tmp_path / "hf", GPTQ, packers.gptq())
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    block = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    del block["quant_method"]
    (tmp_path / "hf" / "quantize_config.json").write_text(json.dumps(block))
    assert check(tmp_path / "hf", plain).config.quantization is not None


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes', which is not"),
        ({**GPTQ, "bits": 3}, "gptq with 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "differ by module"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**AWQ, "bits": 8}, "awq with 8 bits"),
        (compressed("nvfp4-pack-quantized", FLOAT8), "format nvfp4-pack-quantized"),
        ({**compressed("dense", INT8), "sparsity_config": {"format": "x"}}, "sparse"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of \[128\]"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    tmp_path: Path, quantization: Config, message: str
) -> None:
    write(tmp_path / "hf", quantization, packers.gptq())
    with pytest.raises(UnsupportedError, match=message):
        load_checkpoint(tmp_path / "hf", dtype=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{MODULE}.scales"), r"down_proj\.scales is missing"),
        (
            lambda t: t.update({f"{MODULE}.scales": np.ones((1, 64))}),
            r"scales is float64 \[1, 64\]",
        ),
        (lambda t: t[f"{MODULE}.g_idx"].fill(99), r"down_proj\.g_idx names groups 99 to 99"),
        (lambda t: t.update({f"{MODULE}.qzeros": np.ones((12, 8))}), "an integer of shape"),
        (lambda t: t.update({f"{MODULE}.qweight": np.ones(3, np.int32)}), "not a matrix"),
        (lambda t: t.pop(f"{MODULE}.qweight"), rf"missing: {MODULE}\.weight \[64, 384\]"),
    ],
)
def test_b028_broken_gptq_copies(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path / "hf", GPTQ, packers.gptq(), change=change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "hf", dtype=None)
