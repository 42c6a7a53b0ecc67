"""Rounding by a text: GPTQ and AWQ against plain arithmetic, and whole conversions."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax import kernels
from swiftjax.converters.activation_ranges import choose_range, divergence_if_cut
from swiftjax.converters.awq import scale_layer
from swiftjax.converters.calibration import METHODS, Method, Recipe, round_matrix
from swiftjax.converters.convert import convert
from swiftjax.converters.gptq import DAMPING, gptq_codes
from swiftjax.converters.grids import Grid, Shape, best_grid, rounded, spread, widest_grid
from swiftjax.converters.load import load_checkpoint, open_checkpoint
from swiftjax.converters.round_to_nearest import int4_codes
from swiftjax.errors import InvalidRequestError
from swiftjax.kernels import packed_int4
from swiftjax.model.layer_pass import LayerPass, second_moments
from swiftjax.model.params import random_params
from swiftjax.quantization import Quantization
from tests.forward import forward_logits
from tests.tiny import TINY
from tests.tiny_checkpoints import tiny_config, write_checkpoint

INT4 = Shape(0, 15, 64, False)
INT8 = Shape(-127, 127, 0, True)


def texts(count: int = 4, length: int = 48) -> tuple[np.ndarray, ...]:
    """Pieces of random tokens."""
    return tuple(np.random.default_rng(3).integers(0, 256, (count, length)).astype(np.int32))


def correlated(num_tokens: int, num_inputs: int) -> np.ndarray:
    """Inputs that hang together, some of them much larger than others, as in a language model."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((num_inputs // 4, num_inputs))
    x = rng.standard_normal((num_tokens, num_inputs // 4)) @ mixing
    x += 0.3 * rng.standard_normal(x.shape)
    return (x * np.exp(rng.standard_normal(num_inputs))).astype(np.float32)


def plain_gptq(weights: np.ndarray, moments: np.ndarray, grid: Grid, shape: Shape) -> np.ndarray:
    """Optimal brain quantisation with a fixed order: the inverse is updated after every input."""
    num_inputs = weights.shape[1]
    scale, zero = (np.asarray(spread(part, num_inputs, shape), np.float64) for part in grid)
    weights, codes = weights.astype(np.float64).copy(), np.zeros(weights.shape)
    damping = DAMPING * np.trace(moments) / num_inputs
    inverse = np.linalg.inv(moments.astype(np.float64) + damping * np.eye(num_inputs))
    left = np.ones(num_inputs, bool)
    for i in np.argsort(-np.diagonal(moments), kind="stable"):
        codes[:, i] = np.clip(
            np.rint(weights[:, i] / scale[:, i]) + zero[:, i], shape.low, shape.high
        )
        error = (weights[:, i] - (codes[:, i] - zero[:, i]) * scale[:, i]) / inverse[i, i]
        left[i] = False
        weights[:, left] -= np.outer(error, inverse[i, left])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return codes


@pytest.mark.parametrize("shape", [INT4, INT4._replace(group=32, symmetric=True), INT8])
@pytest.mark.parametrize("num_inputs", [80, 200])
def test_gptq_is_optimal_brain_quantisation(shape: Shape, num_inputs: int) -> None:
    """In one block and in two, with a short last group: the codes of the plain algorithm."""
    x = correlated(600, num_inputs)
    weights = np.random.default_rng(1).standard_normal((24, num_inputs)).astype(np.float32)
    moments = second_moments(jnp.asarray(x))
    grid = widest_grid(jnp.asarray(weights), shape)
    codes = np.asarray(gptq_codes(jnp.asarray(weights), moments, grid, shape))
    wanted = plain_gptq(weights, np.asarray(moments), grid, shape)
    # A rounding error next to half a step moves one code and, a little, those after it.
    assert (codes != wanted).mean() < 0.01
    assert np.abs(codes - wanted).max() <= 1


def output_error(method: Method, shape: Shape, x: np.ndarray, weights: np.ndarray) -> float:
    """Relative error of the product after rounding a matrix by a method."""
    moments = second_moments(jnp.asarray(x))
    packed = round_matrix(jnp.asarray(weights), moments, shape, method)
    if shape.group:
        dense = packed_int4.dequantize(
            packed["kernel"], packed["kernel_scale"], packed["kernel_zero"],
            num_inputs=weights.shape[1], group_size=shape.group,
        )  # fmt: skip
    else:
        dense = packed["kernel"].astype(jnp.float32) * packed["kernel_scale"][:, None]
    return float(
        np.linalg.norm(x @ (np.asarray(dense) - weights).T) / np.linalg.norm(x @ weights.T)
    )


@pytest.mark.parametrize("shape", [INT4, INT8])
def test_gptq_halves_the_error_of_inputs_that_hang_together(shape: Shape) -> None:
    weights = np.random.default_rng(1).standard_normal((40, 192)).astype(np.float32)
    x = correlated(1000, 192)
    assert output_error("gptq", shape, x, weights) < 0.5 * output_error("rtn", shape, x, weights)


def test_a_drawn_in_range_is_never_worse() -> None:
    weights = jnp.asarray(np.random.default_rng(1).standard_t(3, (40, 80)).astype(np.float32))
    moments = second_moments(jnp.asarray(correlated(500, 80)))
    whole, best = widest_grid(weights, INT4), best_grid(weights, moments, INT4)
    for group in (slice(0, 64), slice(64, 80)):
        errors = []
        for grid in (whole, best):
            wrong = np.asarray(rounded(weights, grid, INT4) - weights)[:, group]
            errors.append(((wrong @ np.asarray(moments)[group, group]) * wrong).sum(axis=1))
        assert (errors[1] <= errors[0] * 1.0001).all() and errors[1].sum() < 0.9 * errors[0].sum()


@pytest.mark.parametrize("symmetric", [False, True])
def test_grids_are_those_of_rounding_to_nearest(symmetric: bool) -> None:
    weights = np.random.default_rng(1).standard_normal((40, 80)).astype(np.float32)
    weights[0], weights[1] = 0, np.abs(weights[1])
    grid = widest_grid(jnp.asarray(weights), INT4._replace(symmetric=symmetric))
    codes, scale, zero = int4_codes(weights, 64, symmetric)
    np.testing.assert_allclose(grid.scale.T, scale, rtol=1e-6)
    np.testing.assert_array_equal(grid.zero.T, zero)
    assert not symmetric or ((zero == 8).all() and codes.min() >= 1)


BIASED = replace(
    TINY, family="qwen2", num_heads=6, num_kv_heads=2, qkv_bias=True, mlp_bias=True,
    hidden_size=48, head_dim=8,
)  # fmt: skip


@pytest.mark.parametrize("names", [None, ("attention.output",)])
def test_scaling_changes_no_output(names: tuple[str, ...] | None) -> None:
    """With heads that share values and with biases; the moments are those of the new inputs."""
    runs = LayerPass(BIASED, length=32, implementation="xla")
    prefix = "layers.0."
    params = {
        name.removeprefix(prefix): values
        for name, values in random_params(BIASED, jnp.dtype("float32")).items()
        if name.startswith(prefix)
    }
    x = jnp.asarray(correlated(32, 48))
    before = runs.observe(0, params, x)
    shapes = dict.fromkeys(names or before.moments, INT4._replace(group=32))
    scaled, moments = scale_layer(params, before.moments, shapes, BIASED)
    after = runs.observe(0, scaled, x)
    np.testing.assert_allclose(after.hidden, before.hidden, atol=2e-5 * float(jnp.abs(x).max()))
    for name in shapes:
        kernel = f"{name}.kernel"
        assert not np.allclose(scaled[kernel], params[kernel], rtol=0.01)
        size = float(jnp.abs(moments[name]).max())
        np.testing.assert_allclose(after.moments[name], moments[name], atol=1e-4 * size)


def test_whole_model(tmp_path: Path) -> None:
    """Hidden 80 with groups of 64 has a short last one; a head is rounded too, if not kept."""
    source = write_checkpoint(tmp_path / "hf", tiny_config(hidden_size=80, head_dim=16))
    asked = Quantization(kind="int4", group_size=64, keep=("layers.0.*", "*.output"))
    recipe = Recipe(method="awq", texts=texts())
    convert(source, tmp_path / "native", dtype=None, quantization=asked, recipe=recipe)
    stored = load_checkpoint(tmp_path / "native", dtype=None)
    assert stored.config.quantization == asked
    packed = {n.removesuffix("_scale") for n in stored.params if n.endswith("_scale")}
    wanted = {"layers.1.attention.qkv", "layers.1.mlp.gate_up", "layers.1.mlp.down", "head"}
    assert packed == {f"{name}.kernel" for name in wanted}
    ids = texts()[0].tolist()
    dense = load_checkpoint(source, dtype=None)
    logits = forward_logits(dense.config, dense.params, ids)
    error = np.std(forward_logits(stored.config, stored.params, ids) - logits) / np.std(logits)
    assert 0 < error < 0.4


def test_ranges_of_histograms() -> None:
    """A bell that ends near bin 200, and one value ten times as large: it is cut off."""
    counts = np.floor(1e5 * np.exp(-((np.arange(2048) / 60) ** 2)))
    counts[-1] = 1
    assert 150 < choose_range(counts, 2048.0, "percentile") < 180
    assert 180 < choose_range(counts, 2048.0, "kl") < 220
    even = np.full(2048, 10.0)
    assert choose_range(even, 3.0, "kl") == pytest.approx(3.0)
    assert choose_range(even, 3.0, "percentile") == pytest.approx(3.0, rel=1e-3)
    assert choose_range(np.zeros(2048), 0.0, "kl") == 0.0


def test_divergence_is_the_textbook_sum() -> None:
    """256 bins in 128 levels of two: pairs are averaged, the tail joins the last bin."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, 300).astype(np.float64)
    before = counts[:256].copy()
    after = np.repeat(before.reshape(128, 2).mean(axis=1), 2)
    before[-1] += counts[256:].sum()
    p, q = before / before.sum(), after / after.sum()
    assert divergence_if_cut(counts, 256) == pytest.approx((p * np.log(p / q)).sum())


def test_static_activation_scales(tmp_path: Path) -> None:
    """One stored scale per projection, whose range is near the inputs that the text gives."""
    source = write_checkpoint(tmp_path / "hf", tiny_config())
    asked = Quantization(kind="w8a8", keep=(), static_activations=True)
    recipe = Recipe(method="gptq", ranges="kl", texts=texts())
    convert(source, tmp_path / "native", dtype=None, quantization=asked, recipe=recipe)
    stored = load_checkpoint(tmp_path / "native", dtype=None)
    assert stored.config.quantization == asked
    scales = {n: float(x[0]) for n, x in stored.params.items() if n.endswith("input_scale")}
    assert len(scales) == 9
    dense = load_checkpoint(source, dtype=None)
    runs = LayerPass(dense.config, length=48, implementation="xla")
    first = {n[9:]: x for n, x in dense.params.items() if n.startswith("layers.0.")}
    embedded = [runs.embed(dense.params["embed.embedding"], piece) for piece in texts()]
    peaks = [float(runs.observe(0, first, x).peaks["attention.qkv"]) for x in embedded]
    kept = scales["layers.0.attention.qkv.kernel_input_scale"] * 127
    assert 0.3 * max(peaks) < kept <= 1.0001 * max(peaks)
    ids = texts()[0].tolist()
    logits = forward_logits(dense.config, dense.params, ids)
    error = np.std(forward_logits(stored.config, stored.params, ids) - logits) / np.std(logits)
    assert 0 < error < 0.1
    with pytest.raises(InvalidRequestError, match="come from a calibration text"):
        load_checkpoint(source, dtype=None, quantization=asked)


def test_recipes_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "hf", tiny_config())
    with pytest.raises(
        InvalidRequestError, match="gptq with dynamic ranges, and there are 0 pieces"
    ):
        Recipe(method="gptq")
    with pytest.raises(InvalidRequestError, match="anything else reads none"):
        Recipe(texts=texts())
    recipe = Recipe(method="gptq", texts=texts())
    with pytest.raises(InvalidRequestError, match="knows int8, int4, w8a8, not fp8"):
        open_checkpoint(source, dtype=None, quantization=Quantization(kind="fp8"), recipe=recipe)
    asked = Quantization(kind="int8")
    convert(source, tmp_path / "native", dtype=None, quantization=asked)
    with pytest.raises(InvalidRequestError, match="quantised already"):
        open_checkpoint(tmp_path / "native", dtype=None, quantization=asked, recipe=recipe)
    assert METHODS == ("rtn", "awq", "gptq")


def test_a_gpu_leaves_models_that_its_kernels_lack_to_xla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads 8 wide are narrower than Triton's kernels know."""
    monkeypatch.setattr(kernels, "choose_implementation", lambda _: "triton")
    source = write_checkpoint(tmp_path / "hf", tiny_config(head_dim=8))
    asked = Quantization(kind="int4", group_size=64)
    recipe = Recipe(method="gptq", texts=texts())
    convert(source, tmp_path / "native", dtype=None, quantization=asked, recipe=recipe)
    assert load_checkpoint(tmp_path / "native", dtype=None).config.quantization == asked
