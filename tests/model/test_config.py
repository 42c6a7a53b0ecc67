"""config.json as read by us and by transformers; what is refused, and by which name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.hf_config import model_config_from_hf
from swiftjax.hf_rope import read_rope
from swiftjax.model.rope import attention_factor, inverse_frequencies
from swiftjax.model_config import FAMILIES, RopeConfig

VARIANTS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "goldens" / "configs.json").read_text()
)
TINY = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_reads_what_transformers_reads(name: str) -> None:
    """Absent keys, nulls and rope spellings mean what the family's config class makes of them."""
    expected = dict(VARIANTS[name]["expected"])
    config = model_config_from_hf(VARIANTS[name]["config"])
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(frequencies, expected.pop("inverse_frequencies"), rtol=5e-7)
    assert attention_factor(config.rope) == pytest.approx(expected.pop("attention_factor"))
    got = {key: getattr(config, key) for key in expected}
    got["layer_windows"] = [config.window(i) for i in range(config.num_layers)]
    got["eos_token_ids"] = list(config.eos_token_ids)
    assert got == expected


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"rope_theta": 500000}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}, 5e5),
        ({"rope_theta": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({}, 1e4),
        ({"rope_theta": None, "rope_scaling": None}, 1e4),
        ({"rope_parameters": None, "rope_theta": 2e4}, 2e4),
    ],
    ids=["top", "nested", "conflict", "neither", "nulls", "null block"],
)
def test_b021_rope_theta_is_found_wherever_it_stands(keys, theta, caplog) -> None:
    """A conflict is settled for the nested value, with a warning that names both."""
    assert read_rope(keys, 256) == RopeConfig(theta=theta, original_max_position=256)
    conflict = "rope_theta" in keys and (keys.get("rope_parameters") or {}).get("rope_theta")
    assert bool(caplog.messages) == bool(conflict)
    if conflict:
        assert "7" in caplog.text and "500000" in caplog.text


def test_b021_scaling_keys_inside_rope_parameters_are_read() -> None:
    block = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    expected = RopeConfig(kind="llama3", theta=5e5, factor=32.0, original_max_position=8192)
    assert read_rope({"rope_parameters": block}, 131072) == expected
    assert model_config_from_hf({**TINY, "rope_parameters": block}).rope == expected


@pytest.mark.parametrize("kind", ["longrope", "mrope", "su", "", None, ["linear"]])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
def test_b021_an_unknown_rope_type_is_refused_by_name(kind, key, block) -> None:
    with pytest.raises(UnsupportedError) as error:
        read_rope({block: {key: kind, "factor": 2.0}}, 256)
    assert repr(kind) in str(error.value) and "yarn" in str(error.value)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"rope_type": "linear"}, ["linear", "factor", "None"]),
        ({"rope_type": "yarn", "factor": "4"}, ["yarn", "factor", "'4'"]),
        ({"rope_type": "dynamic", "factor": True}, ["dynamic", "factor", "True"]),
        ({"rope_type": "linear", "factor": -1.0}, ["factor", "-1.0"]),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, ["high_freq_factor"]),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, ["low_freq_factor"]),
    ],
)
def test_an_incomplete_rope_block_is_refused(block, words) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read_rope({"rope_parameters": block}, 256)
    assert all(word in str(error.value) for word in words)


def test_rope_per_layer_type_is_refused() -> None:
    block = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(UnsupportedError, match="full_attention"):
        read_rope({"rope_parameters": block}, 256)


@pytest.mark.parametrize(
    "keys", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_partial_rotation_is_refused(keys) -> None:
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor 0\.5"):
        model_config_from_hf({**TINY, **keys})


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, {"eos_token_id": [2, 30]}, (2, 30)),
        (2, {"eos_token_id": 30}, (30, 2)),
        (2, {}, (2,)),
        (2, {"temperature": 0.7}, (2,)),
        (2, {"eos_token_id": None}, (2,)),
        ([7, 9], {"eos_token_id": [9, 11]}, (9, 11, 7)),
        (None, {"eos_token_id": 5}, (5,)),
        (None, None, ()),
    ],
)
def test_b008_eos_ids_of_both_files_are_united(config_eos, generation, expected) -> None:
    config = {**TINY, "eos_token_id": config_eos}
    assert model_config_from_hf(config, generation).eos_token_ids == expected


def test_b008_a_default_eos_id_does_not_join_those_that_a_file_names() -> None:
    assert model_config_from_hf(TINY).eos_token_ids == (2,)
    assert model_config_from_hf(TINY, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    qwen = {**TINY, "model_type": "qwen2", "num_key_value_heads": 4}
    assert model_config_from_hf(qwen).eos_token_ids == ()


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({}, None),
    ],
)
def test_dtype_keys(keys, dtype) -> None:
    assert model_config_from_hf({**TINY, **keys}).dtype == dtype


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_an_unknown_dtype_is_refused_by_name(key) -> None:
    with pytest.raises(UnsupportedError, match=r"float8_e4m3fn.*float32, bfloat16, float16"):
        model_config_from_hf({**TINY, key: "float8_e4m3fn"})


@pytest.mark.parametrize("keys", [{"model_type": "gemma3"}, {"model_type": None}])
def test_an_unknown_family_is_refused_by_name(keys) -> None:
    config = {**TINY, **keys, "architectures": ["GemmaForCausalLM"]}
    with pytest.raises(UnsupportedError) as error:
        model_config_from_hf(config)
    for word in (repr(keys["model_type"]), "GemmaForCausalLM", *FAMILIES):
        assert word in str(error.value)


def test_the_architecture_names_the_family_where_model_type_is_absent() -> None:
    config = {k: v for k, v in TINY.items() if k != "model_type"}
    config = {**config, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
    assert model_config_from_hf(config).family == "qwen3"


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"head_dim": 7}, "7"),
    ],
)
def test_unsupported_options_are_refused_by_name(keys, word) -> None:
    with pytest.raises(UnsupportedError, match=word):
        model_config_from_hf({**TINY, **keys})


@pytest.mark.parametrize("value", [None, 0, -4, 2.5, "32", True])
@pytest.mark.parametrize("key", [key for key in TINY if key != "model_type"])
def test_sizes_must_be_positive_integers(key, value) -> None:
    with pytest.raises(InvalidRequestError, match=key):
        model_config_from_hf({**TINY, key: value})
    with pytest.raises(InvalidRequestError, match=key):
        model_config_from_hf({k: v for k, v in TINY.items() if k != key})


@pytest.mark.parametrize("value", [None, 0, -1e-5, "1e-5", float("nan")])
def test_rms_norm_eps_must_be_positive(value) -> None:
    with pytest.raises(InvalidRequestError, match="rms_norm_eps"):
        model_config_from_hf({**TINY, "rms_norm_eps": value})


def test_kv_heads_must_divide_query_heads() -> None:
    with pytest.raises(InvalidRequestError, match=r"\(4\).*\(3\)"):
        model_config_from_hf({**TINY, "num_key_value_heads": 3})


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "chunked_attention"]])
def test_layer_types_must_describe_known_layers(kinds) -> None:
    config = {**TINY, "model_type": "qwen2", "num_key_value_heads": 4, "use_sliding_window": True}
    with pytest.raises(UnsupportedError, match="layer_types"):
        model_config_from_hf({**config, "layer_types": kinds})
