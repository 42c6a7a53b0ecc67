"""GGUF files give the same model as the Hugging Face directory they were made from."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from swiftjax.config import RopeConfig
from swiftjax.converters.gguf_source import GgufSource, gguf_name, hf_name, unpermute
from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError, UnsupportedError
from tests.tiny_checkpoints import tiny_config, tiny_shapes, tiny_tensors, write_checkpoint
from tests.tiny_gguf import permute, quantize, write_gguf

Q = GGMLQuantizationType


def wide_config(family: str = "llama", **keys: Any) -> dict[str, Any]:
    """Rows of 256, which every quantisation can hold."""
    return tiny_config(
        family, hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1, **keys
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_equals_the_directory_it_was_made_from(
    tmp_path: Path, family: str, tied: bool
) -> None:
    config = tiny_config(family, rope_theta=5e5, tie_word_embeddings=tied)
    if family == "llama":
        config |= {"attention_bias": True, "mlp_bias": True}
    tensors = tiny_tensors(config)
    directory = load_checkpoint(write_checkpoint(tmp_path / "hf", config, tensors), dtype=None)
    file = load_checkpoint(write_gguf(tmp_path / "x.gguf", config, tensors), dtype=None)
    assert file.config == directory.config
    assert file.params.keys() == directory.params.keys()
    for name, values in file.params.items():
        assert np.array_equal(np.asarray(values), np.asarray(directory.params[name])), name


@pytest.mark.parametrize("num_heads", [1, 2, 9])
def test_b038_unpermuting_is_lossless(num_heads: int) -> None:
    """Row 2i+k of a head goes to row k*H/2+i, and back."""
    values = np.random.default_rng(0).standard_normal((num_heads * 8, 5)).astype(np.float32)
    restored = unpermute(values, num_heads)
    for head in range(num_heads):
        for i in range(4):
            for k in range(2):
                assert np.array_equal(restored[head * 8 + k * 4 + i], values[head * 8 + 2 * i + k])
    assert np.array_equal(permute(restored, num_heads), values)


def test_b038_hugging_face_files_and_other_architectures_are_not_permuted(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    tensors = tiny_tensors(config)
    name = "model.layers.0.self_attn.q_proj.weight"
    source = GgufSource(write_gguf(tmp_path / "x.gguf", config, tensors))
    assert np.array_equal(source.read(name), tensors[name])
    loaded = load_checkpoint(write_checkpoint(tmp_path / "hf", config, tensors), dtype=None)
    kernel = np.asarray(loaded.params["layers.0.attention.qkv.kernel"])
    assert np.array_equal(kernel[:, :32], tensors[name].T)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_quantisations(tmp_path: Path, name: str) -> None:
    """Values come back as close as the format allows, in every matrix."""
    bits = {"F32": 24, "F16": 11, "BF16": 8, "Q8_0": 7, "Q5_0": 4, "Q4_0": 3, "Q4_1": 3}[name]
    config = wide_config()
    tensors = tiny_tensors(config)
    source = GgufSource(write_gguf(tmp_path / "x.gguf", config, tensors, quantization=Q[name]))
    assert source.file_dtype is None
    for tensor, values in tensors.items():
        found = source.read(tensor)
        assert found.dtype == np.float32 and found.shape == values.shape
        assert np.abs(found - values).max() <= np.abs(values).max() * 2.0**-bits


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quantisations(tmp_path: Path, name: str) -> None:
    """Super-blocks of 256: the gguf package cannot write them, so the bytes are drawn."""
    rng = np.random.default_rng(0)
    config = wide_config()
    block, size = GGML_QUANT_SIZES[Q[name]]
    data = rng.integers(0, 256, (320, 256 // block * size), dtype=np.uint8)
    # The half-precision scales: first two for Q4_K and Q5_K, the last for Q6_K.
    for start in (-2,) if name == "Q6_K" else (0, 2):
        data[:, start : start + 2 or None] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    path = write_gguf(
        tmp_path / "x.gguf",
        config,
        tiny_tensors(config),
        extra={"token_embd.weight": (data, Q[name])},
    )
    loaded = load_checkpoint(path, dtype="float32")
    expected = gguf.dequantize(data, Q[name])
    assert np.ptp(expected) > 0.1
    assert np.array_equal(np.asarray(loaded.params["embed.embedding"]), expected)


@pytest.mark.parametrize("name", ["Q5_1", "Q2_K", "Q3_K", "IQ4_XS", "I8"])
def test_other_quantisations_are_refused_by_name(tmp_path: Path, name: str) -> None:
    block, size = GGML_QUANT_SIZES[Q[name]]
    dtype = np.int8 if name == "I8" else np.uint8
    data = np.zeros((320, 256 // block * size), dtype)
    path = write_gguf(
        tmp_path / "x.gguf", wide_config(), {}, extra={"token_embd.weight": (data, Q[name])}
    )
    with pytest.raises(UnsupportedError, match=f"token_embd.weight.*{name}.*Q6_K"):
        GgufSource(path)


def test_missing_unexpected_and_misshapen_are_listed_by_their_gguf_names(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.ones((24, 32), np.float32)
    path = write_gguf(
        tmp_path / "x.gguf",
        config,
        tensors,
        extra={"blk.0.ffn_gate_inp.weight": quantize(np.ones((4, 32), np.float32), Q.F32)},
    )
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, dtype=None)
    for problem in (
        "missing: blk.1.ffn_up.weight [48, 32]",
        "unexpected: blk.0.ffn_gate_inp.weight [4, 32]",
        "misshapen: blk.0.attn_q.weight is [24, 32], the configuration asks for [32, 32]",
    ):
        assert problem in str(caught.value).splitlines()


def test_names_go_both_ways() -> None:
    for family in ("llama", "qwen2", "qwen3"):
        config = tiny_config(family, attention_bias=True, mlp_bias=True)
        for name, _ in tiny_shapes(config):
            assert hf_name(gguf_name(name)) == name != gguf_name(name)
    assert hf_name("blk.0.attn_qkv.weight") == "blk.0.attn_qkv.weight"
    assert gguf_name("strange") == hf_name("strange") == "strange"


def rope_of(tmp_path: Path, metadata: dict[str, Any], **keys: Any) -> RopeConfig:
    config = tiny_config(**keys)
    path = write_gguf(tmp_path / "x.gguf", config, tiny_tensors(config), metadata=metadata)
    return load_checkpoint(path, dtype=None).config.rope


def test_rope_scaling_linear_and_yarn(tmp_path: Path) -> None:
    assert rope_of(tmp_path, {}).kind == "default"
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert rope_of(tmp_path, linear) == RopeConfig(
        kind="linear", factor=4.0, original_max_position=256
    )
    assert rope_of(tmp_path, {"llama.rope.scale_linear": 2.0}).factor == 2.0
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    }
    assert rope_of(tmp_path, yarn) == RopeConfig(
        kind="yarn", factor=4.0, original_max_position=64, beta_fast=16.0
    )


def llama3_factors(original: int, factor: float = 8.0, theta: float = 5e5) -> np.ndarray:
    """Divisors as llama.cpp's exporter computes them, in its own words: by wavelength."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, 64, 2) / 64)
    out = []
    for wavelength in wavelengths:
        if wavelength < original / 4:
            out.append(1.0)
        elif wavelength > original / 1:
            out.append(factor)
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("original", [8192, 512])
def test_b022_rope_freqs_are_llama3_scaling(tmp_path: Path, original: int) -> None:
    """The exporter's per-pair divisors mean the four numbers of config.json."""
    config = wide_config(rope_theta=5e5)
    path = write_gguf(
        tmp_path / "x.gguf",
        config,
        tiny_tensors(config),
        metadata={}
        if original == 8192
        else {"llama.rope.scaling.original_context_length": original},
        extra={"rope_freqs.weight": (llama3_factors(original), Q.F32)},
    )
    assert load_checkpoint(path, dtype=None).config.rope == RopeConfig(
        kind="llama3",
        theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=original,
    )


def test_rope_freqs_of_another_kind_are_refused(tmp_path: Path) -> None:
    config = wide_config(rope_theta=5e5)
    for factors, refused in (
        (np.ones(32, np.float32), False),
        (np.linspace(1, 8, 32, dtype=np.float32), True),
        (llama3_factors(8192)[:16], True),
        (llama3_factors(4096), True),
    ):
        path = write_gguf(
            tmp_path / "x.gguf",
            config,
            tiny_tensors(config),
            extra={"rope_freqs.weight": (factors, Q.F32)},
        )
        if refused:
            with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight is not Llama 3"):
                load_checkpoint(path, dtype=None)
        else:
            assert load_checkpoint(path, dtype=None).config.rope.kind == "default"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma2"}, "'gemma2'.*llama, qwen2, qwen3"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.attention.sliding_window": 32}, "sliding_window is 32"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4; only 8"),
        ({"llama.attention.value_length": 16}, "value_length is 16"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv differs between layers"),
        ({"llama.logit_scale": 0.25}, "logit_scale"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.pre": "other"}, "other"),
    ],
)
def test_options_without_a_counterpart_are_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "x.gguf", config, tiny_tensors(config), metadata=metadata)
    with pytest.raises(UnsupportedError, match=message) as caught:
        load_checkpoint(path, dtype=None)
    assert "x.gguf" in str(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.block_count": None},
        {"llama.context_length": None},
        {"llama.attention.head_count": "x"},
        {"llama.attention.head_count": 0},
        {"llama.embedding_length": "x"},
        {"llama.attention.layer_norm_rms_epsilon": "x"},
        {"llama.rope.freq_base": [1.0]},
        {"llama.block_count": 2**31},
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -1.0},
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": "x"},
        {"llama.attention.sliding_window": "x"},
        {"split.count": "x"},
        {"tokenizer.ggml.eos_token_id": "x"},
        {"tokenizer.ggml.tokens": [1, 2]},
        {"general.alignment": 0},
    ],
)
def test_broken_metadata(tmp_path: Path, metadata: dict[str, Any]) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "x.gguf", config, tiny_tensors(config), metadata=metadata)
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        load_checkpoint(path, dtype=None)


def test_layer_counts_given_per_layer(tmp_path: Path) -> None:
    """Some files give head counts as a list; equal entries are one number."""
    config = tiny_config()
    metadata = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [48, 48]}
    path = write_gguf(tmp_path / "x.gguf", config, tiny_tensors(config), metadata=metadata)
    assert load_checkpoint(path, dtype=None).config.num_kv_heads == 2


def test_end_of_turn_ids_stop_too(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_gguf(
        tmp_path / "x.gguf",
        config,
        tiny_tensors(config),
        metadata={"tokenizer.ggml.eot_token_id": 256},
    )
    assert load_checkpoint(path, dtype=None).config.eos_token_ids == (258, 256)
