"""Quantise a model by what it sees of a text: layer by layer, in the order of computation.

Each layer is run on pieces of text, its projections are rounded by the method asked for, and the
next one sees what the rounded layer gives. Only one layer is held. Called by `quantize.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from swiftjax import kernels
from swiftjax.config import ModelConfig
from swiftjax.converters.awq import Params, scale_layer
from swiftjax.converters.gptq import gptq_codes
from swiftjax.converters.grids import Grid, Shape, best_grid, codes_of, shape_of, widest_grid
from swiftjax.errors import InvalidRequestError
from swiftjax.kernels import packed_int4
from swiftjax.model.layer_pass import PROJECTIONS, LayerPass, second_moments
from swiftjax.quantization import QuantType

# rtn: to the nearest value. awq: after scaling inputs. gptq: errors made up for by later weights.
Method = Literal["rtn", "awq", "gptq"]
METHODS: tuple[Method, ...] = get_args(Method)
CALIBRATED_KINDS: tuple[QuantType, ...] = ("int8", "int4", "w8a8")

Tensors = Iterable[tuple[str, np.ndarray | Array]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How weights are rounded; `texts` are pieces of token ids, all of one length.

    Raises InvalidRequestError for a method that lacks texts or texts that no method reads.
    """

    method: Method = "rtn"
    symmetric: bool = False  # int4: the zero point is the middle code
    texts: tuple[Int32[np.ndarray, " T"], ...] = ()

    def __post_init__(self) -> None:
        if (self.method == "rtn") == bool(self.texts):
            raise InvalidRequestError(
                f"the method is {self.method}, with {len(self.texts)} pieces of text: awq and gptq "
                "need a calibration text, rtn reads none"
            )

    def check_kind(self, kind: QuantType) -> None:
        """Raise InvalidRequestError for a format that the method does not know."""
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
        chosen = kernels.choose_implementation(jax.default_backend())
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
        moments: Params = {}
        for x in self._states:
            seen = self._dense.observe(layer, params, x).moments
            moments = {n: m if n not in moments else moments[n] + m for n, m in seen.items()}
        if self.recipe.method == "awq":
            params, moments = scale_layer(params, moments, shapes, self.config)
        return _round_projections(params, moments, shapes, self.recipe)

    def _head(self, params: Params) -> Params:
        shapes = self._shapes("", ("head",))
        if not shapes:
            return params
        moments = sum_moments(self._states)
        named = {f"head.{name}": values for name, values in params.items()}
        named = _round_projections(named, {"head": moments}, shapes, self.recipe)
        return {name.removeprefix("head."): values for name, values in named.items()}

    def _shapes(self, prefix: str, names: Iterable[str]) -> dict[str, Shape]:
        forms = {name: self.config.weight_format(prefix + name) for name in names}
        symmetric = self.recipe.symmetric
        return {n: shape_of(form, symmetric=symmetric) for n, form in forms.items() if form}


def sum_moments(states: Iterable[Float[Array, "T K"]]) -> Float32[Array, "K K"]:
    """The sum of x.T @ x over pieces of text."""
    return sum((second_moments(x) for x in states), start=jnp.zeros((), jnp.float32))


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
