"""Quantised checkpoints: what is stored, what loads, what is refused, and what the model says."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax import Engine, EngineConfig, GenerationConfig, kernels
from swiftjax.build import build_core
from swiftjax.converters.convert import convert
from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError, InvalidRequestError
from swiftjax.kernels import packed_int4
from swiftjax.model.params import abstract_params, random_params
from swiftjax.quantization import QUANT_TYPES, Quantization, QuantType
from tests.forward import forward_logits
from tests.tiny_checkpoints import tiny_config, write_checkpoint

IDS = list(range(2, 40))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hf", tiny_config())


@pytest.mark.parametrize("kind", QUANT_TYPES)
def test_native_equals_quantising_while_loading(tmp_path: Path, source: Path, kind: str) -> None:
    asked = Quantization(kind=kind, group_size=32)  # type: ignore[arg-type]
    report = convert(source, tmp_path / "native", dtype=None, quantization=asked)
    stored = load_checkpoint(tmp_path / "native", dtype=None)
    direct = load_checkpoint(source, dtype=None, quantization=asked)
    assert stored.config == direct.config == report.config
    assert stored.config.quantization == asked
    assert stored.params.keys() == direct.params.keys()
    for name, values in stored.params.items():
        assert np.asarray(values).tobytes() == np.asarray(direct.params[name]).tobytes(), name
    assert report.num_bytes == sum(values.nbytes for values in stored.params.values())
    likes = abstract_params(stored.config, jnp.dtype(stored.config.dtype or "float32"))
    assert {n: (x.shape, x.dtype) for n, x in likes.items()} == {
        n: (x.shape, x.dtype) for n, x in stored.params.items()
    }


@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.05), ("int4", 0.5), ("fp8", 0.2)])
def test_logits_equal_those_of_the_dequantised_weights(
    source: Path, kind: QuantType, limit: float
) -> None:
    """Exactly the stored weights are multiplied; `limit` is how far these are from the dense."""
    asked = Quantization(kind=kind, group_size=32)
    loaded = load_checkpoint(source, dtype="float32", quantization=asked)
    dense = load_checkpoint(source, dtype="float32")
    logits = forward_logits(loaded.config, loaded.params, IDS)
    params = dict(dense.params)
    for name in params:
        if (scale := loaded.params.get(f"{name}_scale")) is not None:
            codes = loaded.params[name]
            if kind == "int4":
                zero = loaded.params[f"{name}_zero"]
                size = {"num_inputs": params[name].shape[0], "group_size": 32}
                params[name] = packed_int4.dequantize(codes, scale, zero, **size).T
            else:
                params[name] = codes.astype(jnp.float32).T * scale[None, :]
    wanted = forward_logits(dense.config, params, IDS)
    spread = np.std(wanted)
    if kind != "fp8":  # which rounds activations too
        assert np.abs(logits - wanted).max() < 1e-3 * spread
    unrounded = forward_logits(dense.config, dict(dense.params), IDS)
    assert 0 < np.std(logits - unrounded) < limit * spread


def test_kept_projections_norms_and_embeddings_stay(source: Path) -> None:
    asked = Quantization(kind="int8", keep=("head", "layers.0.*", "*.down"))
    loaded = load_checkpoint(source, dtype=None, quantization=asked)
    quantised = {name for name, values in loaded.params.items() if values.dtype == jnp.int8}
    names = {f"layers.1.{part}.kernel" for part in ("attention.qkv", "attention.output")}
    assert quantised == names | {"layers.1.mlp.gate_up.kernel"}
    assert np.isfinite(forward_logits(loaded.config, loaded.params, IDS)).all()


def test_decoding_equals_prefill(source: Path) -> None:
    asked = Quantization(kind="int4", group_size=64)
    loaded = load_checkpoint(source, dtype="float32", quantization=asked)
    whole = forward_logits(loaded.config, loaded.params, IDS)
    steps = forward_logits(loaded.config, loaded.params, IDS, chunks=[30] + [1] * 8)
    assert np.abs(whole - steps).max() < 1e-4


def test_second_quantisation_is_refused(tmp_path: Path, source: Path) -> None:
    asked = Quantization(kind="int8")
    convert(source, tmp_path / "native", dtype=None, quantization=asked)
    with pytest.raises(InvalidRequestError, match=r"quantised already \(int8\).*int4"):
        load_checkpoint(tmp_path / "native", dtype=None, quantization=Quantization(kind="int4"))
    assert load_checkpoint(tmp_path / "native", dtype=None, quantization=asked).params


def test_manifest_must_fit_the_quantisation(tmp_path: Path, source: Path) -> None:
    native = tmp_path / "native"
    convert(source, native, dtype=None, quantization=Quantization(kind="int8"))
    config = json.loads((native / "config.json").read_text())
    config["quantization_config"]["kind"] = "fp8"
    (native / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is int8, config.json asks for float8_e4m3fn"):
        load_checkpoint(native, dtype=None)
    config["quantization_config"] = {"quant_method": "swiftjax", "kind": "int5"}
    (native / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config"):
        load_checkpoint(native, dtype=None)


def test_impossible_group_size_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="group_size is 48; choose one of 32, 64, 128"):
        Quantization(kind="int4", group_size=48)


@pytest.mark.parametrize("kind", QUANT_TYPES)
def test_random_weights_spread_like_dense_ones(source: Path, kind: QuantType) -> None:
    loaded = load_checkpoint(source, dtype="float32", quantization=Quantization(kind=kind))
    params = random_params(loaded.config, jnp.dtype(jnp.float32))
    assert {n: x.shape for n, x in params.items()} == {n: x.shape for n, x in loaded.params.items()}
    x = jnp.asarray(np.random.default_rng(0).standard_normal((50, loaded.config.hidden_size)))
    name = "layers.0.mlp.gate_up.kernel"
    arrays = [params[name], params[f"{name}_scale"]]
    if kind == "int4":
        y = kernels.int4_matmul(
            x.astype(jnp.float32), *arrays, params[f"{name}_zero"], group_size=128
        )
    else:
        y = getattr(kernels, f"{kind}_matmul")(x.astype(jnp.float32), *arrays)
    assert 0.4 < float(np.std(np.asarray(y))) < 1.6


def test_demo_model_still_speaks(demo_checkpoint: Path) -> None:
    """Its 576 inputs are no multiple of 128: every matrix ends in a short group."""
    config = EngineConfig(
        model_path=str(demo_checkpoint), quantization=Quantization(kind="int4"),
        max_model_len=16, max_batch_size=1, max_total_token_num=16, max_num_batched_tokens=8,
    )  # fmt: skip
    generation = GenerationConfig(max_new_tokens=2, temperature=0.0)
    engine = Engine.from_core(build_core(config))
    (answer,) = engine.generate(["The capital of France is"], generation)
    assert answer.choices[0].text.startswith(" Paris")
