"""GGUF metadata in the words of config.json: what is said exactly, and what is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Q

from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError, UnsupportedError
from swiftjax.model_config import RopeConfig
from tests.tiny_checkpoints import tiny_config, tiny_tensors
from tests.tiny_gguf import wide_config, write_gguf


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
