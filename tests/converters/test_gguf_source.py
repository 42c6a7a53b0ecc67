"""GGUF files give the same model as the Hugging Face directory they were made from."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from swiftjax.converters.gguf_source import GgufSource, gguf_name, hf_name, unpermute
from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError, UnsupportedError
from tests.tiny_checkpoints import tiny_config, tiny_shapes, tiny_tensors, write_checkpoint
from tests.tiny_gguf import permute, quantize, wide_config, write_gguf

Q = GGMLQuantizationType


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


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    config = tiny_config()
    extra = {"model.norm.weight": quantize(np.ones(32, np.float32), Q.F32)}
    path = write_gguf(tmp_path / "x.gguf", config, tiny_tensors(config), extra=extra)
    with pytest.raises(CheckpointError, match=r"x\.gguf has tensors under both"):
        load_checkpoint(path, dtype=None)


def test_names_go_both_ways() -> None:
    for family in ("llama", "qwen2", "qwen3"):
        config = tiny_config(family, attention_bias=True, mlp_bias=True)
        for name, _ in tiny_shapes(config):
            assert hf_name(gguf_name(name)) == name != gguf_name(name)
    assert hf_name("blk.0.attn_qkv.weight") == "blk.0.attn_qkv.weight"
    assert gguf_name("strange") == hf_name("strange") == "strange"
