"""From Hugging Face names to ours: the table, its reports, tying, and the choice of dtype."""

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.converters.hf_llama import model_rules
from swiftjax.converters.load import LoadedCheckpoint, load_checkpoint
from swiftjax.errors import CheckpointError, UnsupportedError
from swiftjax.hf_config import model_config_from_hf
from swiftjax.model.params import abstract_params
from tests.forward import forward_logits
from tests.model.golden_cases import MODELS
from tests.numpy_llama import numpy_logits
from tests.tiny_checkpoints import Tensors, tiny_config, tiny_tensors, write_checkpoint


def load(
    directory: Path, config: dict[str, Any], tensors: Tensors | None = None, dtype: Any = None
) -> LoadedCheckpoint:
    return load_checkpoint(write_checkpoint(directory, config, tensors), dtype=dtype)


@pytest.mark.parametrize("name", MODELS)
def test_table_makes_exactly_the_parameters_of_the_model(name: str) -> None:
    config = model_config_from_hf(MODELS[name][1])
    table = {rule.target: rule.shape for rule in model_rules(config)}
    expected = abstract_params(config, jnp.dtype(jnp.float32))
    assert table == {key: value.shape for key, value in expected.items()}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_tensor_lands_where_it_belongs(tmp_path: Path, family: str) -> None:
    """Matrices stand as [in, out]; q, k, v and gate, up side by side in that order."""
    biases = {"attention_bias": True} | ({"mlp_bias": True} if family == "llama" else {})
    config = tiny_config(family, **({} if family in ("mistral", "qwen2") else biases))
    hf = tiny_tensors(config)
    params = {n: np.asarray(p) for n, p in load(tmp_path / "m", config).params.items()}
    for layer in range(2):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            if f"{theirs}.self_attn.q_proj.{kind}" not in hf:
                continue
            qkv = [hf[f"{theirs}.self_attn.{x}_proj.{kind}"].T for x in "qkv"]
            target = "kernel" if kind == "weight" else "bias"
            assert np.array_equal(
                params[f"{ours}.attention.qkv.{target}"], np.concatenate(qkv, axis=-1)
            )
        gate_up = [hf[f"{theirs}.mlp.{x}_proj.weight"].T for x in ("gate", "up")]
        assert np.array_equal(
            params[f"{ours}.mlp.gate_up.kernel"], np.concatenate(gate_up, axis=-1)
        )
        for target, source in (
            ("attention.output.kernel", "self_attn.o_proj.weight"),
            ("mlp.down.kernel", "mlp.down_proj.weight"),
            ("attention_norm.scale", "input_layernorm.weight"),
            ("mlp_norm.scale", "post_attention_layernorm.weight"),
        ):
            assert np.array_equal(params[f"{ours}.{target}"], hf[f"{theirs}.{source}"].T)
    assert np.array_equal(params["embed.embedding"], hf["model.embed_tokens.weight"])
    assert np.array_equal(params["head.kernel"], hf["lm_head.weight"].T)
    assert np.array_equal(params["norm.scale"], hf["model.norm.weight"])


def test_matrices_larger_than_a_tile_are_transposed(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=600, hidden_size=520, intermediate_size=300, head_dim=130)
    for dtype in ("float32", "bfloat16"):
        hf = tiny_tensors(config, dtype=dtype)
        params = load(tmp_path / dtype, {**config, "torch_dtype": dtype}, hf).params
        assert np.array_equal(np.asarray(params["head.kernel"]), hf["lm_head.weight"].T)


def test_missing_unexpected_and_misshapen_are_all_listed(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.gate_proj.bias"] = np.ones(48, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((48, 32), np.float32)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.ones((48, 32), np.float32)
    tensors["model.embed_tokens.weight"] = np.ones((321, 32), np.float32)
    tensors["lm_head.weight"] = np.ones((320, 32), np.int32)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "m", tiny_config(), tensors)
    for problem in (
        "missing: model.layers.0.self_attn.k_proj.weight [16, 32]",
        "missing: model.norm.weight [32]",
        "unexpected: model.layers.1.mlp.gate_proj.bias [48]",
        "unexpected: model.layers.2.mlp.up_proj.weight [48, 32]",
        "misshapen: model.layers.0.mlp.down_proj.weight is [48, 32], the configuration asks for "
        "[32, 48]",
        "misshapen: model.embed_tokens.weight is [321, 32], the configuration asks for [320, 32]",
        "not a float: lm_head.weight has dtype int32",
    ):
        assert problem in str(caught.value).splitlines()


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    """Old exporters wrote them; they follow from the configuration."""
    tensors = tiny_tensors(tiny_config())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert load(tmp_path / "m", tiny_config(), tensors).params


def head_case(case: str) -> tuple[dict[str, Any], Tensors]:
    """The five combinations of the flag and what the file holds."""
    config = tiny_config(tie_word_embeddings=False, num_hidden_layers=1)
    tensors = tiny_tensors(config)
    if case == "B":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    elif case != "A":
        del tensors["lm_head.weight"]
    if case == "E":
        del config["tie_word_embeddings"]
    else:
        config["tie_word_embeddings"] = case != "C"
    return config, tensors


@pytest.mark.parametrize(
    ("case", "tied", "warning"),
    [
        ("A", False, "holds a different lm_head.weight, which is used"),
        ("B", True, None),
        ("C", True, "holds no lm_head.weight: the embedding is used as the head"),
        ("D", True, None),
        ("E", True, None),
    ],
)
def test_b025_tying_follows_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, tied: bool, warning: str | None
) -> None:
    """The head is the one the file holds, never dropped and never random; the flag only warns."""
    config, tensors = head_case(case)
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path / "m", config, tensors)
    assert loaded.config.tie_word_embeddings is tied
    assert len(caplog.messages) == (warning is not None)
    assert warning is None or warning in caplog.messages[0]
    ids = [5, 250, 17, 3]
    np.testing.assert_allclose(
        forward_logits(loaded.config, loaded.params, ids),
        numpy_logits(config, tensors, ids),
        atol=1e-5,
    )


def test_b021_rope_theta_is_found_in_both_places(tmp_path: Path) -> None:
    """The theta of rope_parameters and of the top level give the same model; neither means 1e4."""
    ids = np.random.default_rng(0).integers(0, 320, 201).tolist()

    def model(**keys: Any) -> LoadedCheckpoint:
        config = tiny_config(num_hidden_layers=1, **keys)
        return load(tmp_path / str(len(list(tmp_path.iterdir()))), config)

    def nested(theta: float, **keys: Any) -> dict[str, Any]:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **keys}}

    top, inner, usual = model(rope_theta=500_000), model(**nested(500_000)), model()
    assert usual.config.rope == model(rope_theta=10_000).config.rope
    # On a conflict the nested value wins, as `read_rope` documents.
    assert top.config.rope == model(rope_theta=10_000, **nested(500_000)).config.rope
    band = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    scaled = model(**nested(500_000, rope_type="llama3", **band))
    old = model(rope_theta=500_000, rope_scaling={"type": "llama3", **band})
    assert scaled.config.rope == old.config.rope and scaled.config.rope.theta == 500_000
    logits = [forward_logits(m.config, m.params, ids) for m in (top, inner, usual, scaled)]
    assert np.array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() > 1e-2
    assert np.abs(logits[0] - logits[3]).max() > 1e-3
    with pytest.raises(UnsupportedError, match="'spiral'"):
        model(**nested(500_000, rope_type="spiral"))


def test_progress_counts_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    directory = write_checkpoint(tmp_path / "m", tiny_config())
    loaded = load_checkpoint(
        directory, dtype="bfloat16", progress=lambda done, total: seen.append((done, total))
    )
    total = sum(p.nbytes for p in loaded.params.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total) and {t for _, t in seen} == {total}


def test_end_of_sequence_ids_of_both_files(tmp_path: Path) -> None:
    directory = write_checkpoint(
        tmp_path / "m", tiny_config(eos_token_id=258), generation={"eos_token_id": [256, 258]}
    )
    config = load_checkpoint(directory, dtype=None).config
    assert set(config.eos_token_ids) == {256, 258} and config.bos_token_id == 257
