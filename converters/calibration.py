"""Quantise a model by what it sees of a text: layer by layer, in the order of computation.

Each layer is run on pieces of text, its projections are rounded by the method asked for, and the
next one sees what the rounded layer gives. Only one layer is held. Called by `quantize.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from swiftjax import kernels
from swiftjax.converters.activation_ranges import NUM_BINS, Range, choose_range
from swiftjax.converters.awq import Params, scale_layer
from swiftjax.converters.gptq import gptq_codes
from swiftjax.converters.grids import Grid, Shape, best_grid, codes_of, shape_of, widest_grid
from swiftjax.errors import InvalidRequestError
from swiftjax.kernels import packed_int4
from swiftjax.kernels.quantized_reference import INT8_MAX, SMALLEST_SCALE
from swiftjax.model.kernel_support import choose_kernels
from swiftjax.model.layer_pass import PROJECTIONS, LayerPass, second_moments
from swiftjax.model.text_pass import PAGE_SIZE
from swiftjax.model_config import ModelConfig
from swiftjax.quantization import Quantization, QuantType

# rtn: to the nearest value. awq: after scaling inputs. gptq: errors made up for by later weights.
Method = Literal["rtn", "awq", "gptq"]
METHODS: tuple[Method, ...] = get_args(Method)
INPUT_SCALE = "kernel_input_scale"
CALIBRATED_KINDS: tuple[QuantType, ...] = ("int8", "int4", "w8a8")

Tensors = Iterable[tuple[str, np.ndarray | Array]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How weights are rounded; `texts` are pieces of token ids, all of one length.

    Raises InvalidRequestError for a method that lacks texts or texts that no method reads.
    """

    method: Method = "rtn"
    symmetric: bool = False  # int4: the zero point is the middle code
    ranges: Range = "dynamic"  # w8a8: what static activations are scaled to
    texts: tuple[Int32[np.ndarray, " T"], ...] = ()

    def __post_init__(self) -> None:
        reads = self.method != "rtn" or self.ranges != "dynamic"
        if reads != bool(self.texts):
            raise InvalidRequestError(
                f"the method is {self.method} with {self.ranges} ranges, and there are "
                f"{len(self.texts)} pieces of text: awq, gptq, kl and percentile need a "
                "calibration text (--calib), anything else reads none"
            )

    def check(self, quantization: Quantization) -> None:
        """Raise InvalidRequestError for a format that the method does not know."""
        kind = quantization.kind
        if (self.ranges != "dynamic") != quantization.static_activations:
            raise InvalidRequestError(
                "static activation scales come from a calibration text: convert the model with "
                "--quant-type w8a8, --activation-range kl or percentile, and --calib"
            )
        if self.method != "rtn" and kind not in CALIBRATED_KINDS:
            raise InvalidRequestError(
                f"the method {self.method} knows {', '.join(CALIBRATED_KINDS)}, not {kind}: leave "
                "it out for rtn"
            )


def calibrated(
    tensors: Tensors, config: ModelConfig, recipe: Recipe
) -> Iterator[tuple[str, np.ndarray]]:
    """Round the projections of a dense model; tensors come and go in the order of computation.

    `config` carries the quantisation.
    """
    rounding = _Rounding(config, recipe)
    for part, group in groupby(tensors, key=lambda item: _part_of(item[0])):
        params = {name.removeprefix(f"{part}."): jnp.asarray(values) for name, values in group}
        for name, values in rounding.part(part, params).items():
            yield f"{part}.{name}", np.asarray(values)


def _part_of(name: str) -> str:
    """embed, layers.3, norm or head."""
    pieces = name.split(".")
    return ".".join(pieces[:2]) if pieces[0] == "layers" else pieces[0]


class _Rounding:
    """Carries the pieces of text through the model as its parts come."""

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        self.config, self.recipe = config, recipe
        chosen = choose_kernels(None, config, PAGE_SIZE)
        dense, length = replace(config, quantization=None), len(recipe.texts[0])
        self._dense = LayerPass(dense, length=length, implementation=chosen)
        self._rounded = LayerPass(config, length=length, implementation=chosen)
        self._states: list[Array] = []

    def part(self, part: str, params: Params) -> Params:
        """Round what is to be rounded of one part, and take the texts through it."""
        if part == "embed":
            texts = self.recipe.texts
            self._states = [self._dense.embed(params["embedding"], piece) for piece in texts]
        elif part == "norm":
            scale, eps = params["scale"], self.config.rms_norm_eps
            self._states = [kernels.rms_norm(x, scale, eps) for x in self._states]
        elif part == "head":
            return self._head(params)
        else:
            layer = int(part.split(".")[1])
            params = self._layer(layer, params)
            self._states = [self._rounded.run(layer, params, x) for x in self._states]
        return params

    def _layer(self, layer: int, params: Params) -> Params:
        shapes = self._shapes(f"layers.{layer}.", PROJECTIONS)
        if not shapes:
            return params
        moments, _ = self._observe(layer, params)
        if self.recipe.method == "awq":
            params, moments = scale_layer(params, moments, shapes, self.config)
        scales = self._input_scales(layer, params, shapes)
        return _round_projections(params, moments, shapes, self.recipe) | scales

    def _input_scales(self, layer: int, params: Params, shapes: dict[str, Shape]) -> Params:
        """Static scales of the inputs of projections, which dense `params` give."""
        if self.recipe.ranges == "dynamic":
            return {}
        _, peaks = self._observe(layer, params)
        counts = [self._dense.histograms(layer, params, x, peaks, NUM_BINS) for x in self._states]
        scales = {}
        for name in shapes:
            total = np.sum([np.asarray(one[name], np.float64) for one in counts], axis=0)
            scales[f"{name}.{INPUT_SCALE}"] = self._input_scale(total, float(peaks[name]))
        return scales

    def _input_scale(self, counts: np.ndarray, peak: float) -> Float32[Array, " 1"]:
        kept = choose_range(counts, peak, self.recipe.ranges)
        return jnp.full((1,), max(kept / INT8_MAX, SMALLEST_SCALE), jnp.float32)

    def _observe(self, layer: int, params: Params) -> tuple[Params, Params]:
        """Moments and peaks of the inputs of projections, over all texts."""
        moments: Params = {}
        peaks: Params = {}
        for x in self._states:
            seen = self._dense.observe(layer, params, x)
            moments = {n: m + moments[n] if moments else m for n, m in seen.moments.items()}
            peaks = {n: jnp.maximum(p, peaks[n]) if peaks else p for n, p in seen.peaks.items()}
        return moments, peaks

    def _head(self, params: Params) -> Params:
        shapes = self._shapes("", ("head",))
        if not shapes:
            return params
        moments = reduce(jnp.add, (second_moments(x) for x in self._states))
        named = {f"head.{name}": values for name, values in params.items()}
        named = _round_projections(named, {"head": moments}, shapes, self.recipe)
        if self.recipe.ranges != "dynamic":
            sizes = np.abs(np.stack([np.asarray(x, np.float32) for x in self._states]))
            counts, _ = np.histogram(sizes, NUM_BINS, (0, float(sizes.max())))
            scale = self._input_scale(counts.astype(np.float64), float(sizes.max()))
            named[f"head.{INPUT_SCALE}"] = scale
        return {name.removeprefix("head."): values for name, values in named.items()}

    def _shapes(self, prefix: str, names: Iterable[str]) -> dict[str, Shape]:
        forms = {name: self.config.weight_format(prefix + name) for name in names}
        symmetric = self.recipe.symmetric
        return {n: shape_of(form, symmetric=symmetric) for n, form in forms.items() if form}


def _round_projections(
    params: Params, moments: Params, shapes: dict[str, Shape], recipe: Recipe
) -> Params:
    """Replace the dense kernels that `shapes` names by the parameters of their format."""
    params = dict(params)
    for name, shape in shapes.items():
        weights = params.pop(f"{name}.kernel").astype(jnp.float32).T
        packed = round_matrix(weights, moments[name], shape, recipe.method)
        params |= {f"{name}.{suffix}": values for suffix, values in packed.items()}
    return params


def round_matrix(
    weights: Float32[Array, "N K"], moments: Float32[Array, "K K"], shape: Shape, method: Method
) -> Params:
    """Round one matrix [outputs, inputs]; keys are those of `round_to_nearest`."""
    grid = best_grid(weights, moments, shape) if shape.group else widest_grid(weights, shape)
    find = gptq_codes if method == "gptq" else _nearest_codes
    return _packed(find(weights, moments, grid, shape), grid, shape)


def _nearest_codes(
    weights: Float32[Array, "N K"], moments: Float32[Array, "K K"], grid: Grid, shape: Shape
) -> Float32[Array, "N K"]:
    del moments
    return codes_of(weights, grid, shape)


def _packed(codes: Float32[Array, "N K"], grid: Grid, shape: Shape) -> Params:
    if not shape.group:
        return {"kernel": codes.astype(jnp.int8), "kernel_scale": grid.scale[:, 0]}
    return {
        "kernel": jnp.asarray(packed_int4.pack(np.asarray(codes).astype(np.uint8))),
        "kernel_scale": grid.scale.T,
        "kernel_zero": grid.zero.T.astype(jnp.uint8),
    }
