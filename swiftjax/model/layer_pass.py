"""Runs single layers of a model over pieces of text, and records what their projections see.

For whoever quantises or examines a model layer by layer without holding all of it: calibration and
parity. The layers are the engine's own; attention goes through a small paged cache as there.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from swiftjax import kernels
from swiftjax.model.kv_cache import make_kv_cache
from swiftjax.model.layer_inputs import LayerInputs, layer_inputs
from swiftjax.model.linear import Linear
from swiftjax.model.llama import Block
from swiftjax.model.rope import make_rope_table
from swiftjax.model.text_pass import PAGE_SIZE, check_length, text_batch
from swiftjax.model_config import ModelConfig

SMALLEST_PEAK = 1e-30  # of inputs that are all zero
# The projections of a layer by their names in it, in the order of computation.
PROJECTIONS = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")


class Observed(NamedTuple):
    """What a layer made of a piece of text, and what its projections were given."""

    hidden: Float[Array, "T D"]
    moments: dict[str, Float32[Array, "K K"]]  # x.T @ x of each projection's inputs
    peaks: dict[str, Float32[Array, ""]]  # the largest absolute input


class LayerPass:
    """Layers of one model over texts of exactly `length` tokens."""

    def __init__(
        self, config: ModelConfig, *, length: int, implementation: kernels.Implementation
    ) -> None:
        """Raises InvalidRequestError for texts longer than the model is made for."""
        check_length(config, length)
        self.config = config
        self._dtype = jnp.dtype(config.dtype or "float32")
        self._blocks: dict[int, Any] = {}  # structure and abstract state of each layer
        table = make_rope_table(config.rope, config.head_dim, length)
        batch = text_batch(np.zeros(length, np.int32), length, PAGE_SIZE)
        batch = jax.tree.map(jnp.asarray, batch)
        self._inputs = layer_inputs(config, table, batch, implementation)
        cache = make_kv_cache(
            replace(config, num_layers=1),
            num_pages=-(-length // PAGE_SIZE), page_size=PAGE_SIZE, dtype=self._dtype,
        )  # fmt: skip
        self._keys, self._values = cache.keys[0], cache.values[0]

    def embed(
        self, embedding: Float[Array, "V D"], tokens: Int32[np.ndarray, " T"]
    ) -> Float[Array, "T D"]:
        """What the first layer is given."""
        return embedding[jnp.asarray(tokens)]

    def observe(self, layer: int, params: Mapping[str, Array], x: Float[Array, "T D"]) -> Observed:
        """Run one layer with the parameters of these names (`mlp.down.kernel`)."""
        structure, weights = self._split(layer, params)
        return _observe(structure, weights, x, self._keys, self._values, self._inputs)

    def histograms(
        self,
        layer: int,
        params: Mapping[str, Array],
        x: Float[Array, "T D"],
        peaks: dict[str, Float32[Array, ""]],
        num_bins: int,
    ) -> dict[str, Int32[Array, " bins"]]:
        """Count absolute inputs of each projection in equal bins from zero to its peak."""
        structure, weights = self._split(layer, params)
        arrays = (x, self._keys, self._values, self._inputs, peaks)
        return _count(structure, num_bins, weights, *arrays)

    def run(
        self, layer: int, params: Mapping[str, Array], x: Float[Array, "T D"]
    ) -> Float[Array, "T D"]:
        """The same without recording."""
        structure, weights = self._split(layer, params)
        return _run(structure, weights, x, self._keys, self._values, self._inputs)

    def _split(self, layer: int, params: Mapping[str, Array]) -> tuple[Any, Any]:
        if layer not in self._blocks:
            block = nnx.eval_shape(
                lambda: Block(self.config, layer, dtype=self._dtype, rngs=nnx.Rngs(0))
            )
            self._blocks[layer] = nnx.split(block)
        structure, state = self._blocks[layer]
        leaves = [params[".".join(map(str, path))] for path, _ in nnx.to_flat_state(state)]
        return structure, jax.tree.unflatten(jax.tree.structure(state), leaves)


class _Tap:
    """Stands in the place of a projection and keeps what it is called with."""

    def __init__(self, projection: Linear) -> None:
        self.projection = projection
        self.seen: list[Array] = []

    def __call__(self, x: kernels.Rows, implementation: kernels.Implementation) -> Array:
        self.seen.append(kernels.plain_rows(x))
        return self.projection(x, implementation)

    def added(
        self, residual: Array, x: kernels.Rows, implementation: kernels.Implementation
    ) -> Array:
        return residual + self(x, implementation)

    def gated(self, x: kernels.Rows, implementation: kernels.Implementation) -> kernels.Gated:
        return kernels.Gated(self(x, implementation))


@partial(jax.jit, static_argnums=0)
def _run(
    structure: Any, weights: Any, x: Array, keys: Array, values: Array, inputs: LayerInputs
) -> Array:
    return nnx.merge(structure, weights)(x, keys, values, inputs)[0]


@partial(jax.jit, static_argnums=0)
def _observe(
    structure: Any, weights: Any, x: Array, keys: Array, values: Array, inputs: LayerInputs
) -> Observed:
    hidden, inputs_of = _tapped(nnx.merge(structure, weights), x, keys, values, inputs)
    return Observed(
        hidden,
        {name: second_moments(seen) for name, seen in inputs_of.items()},
        {name: jnp.abs(seen).max() for name, seen in inputs_of.items()},
    )


@partial(jax.jit, static_argnums=(0, 1))
def _count(
    structure: Any,
    num_bins: int,
    weights: Any,
    x: Array,
    keys: Array,
    values: Array,
    inputs: LayerInputs,
    peaks: dict[str, Array],
) -> dict[str, Array]:
    _, inputs_of = _tapped(nnx.merge(structure, weights), x, keys, values, inputs)

    def count(seen: Array, peak: Array) -> Array:
        places = jnp.abs(seen) / jnp.maximum(peak, SMALLEST_PEAK) * num_bins
        bins = jnp.minimum(places.astype(jnp.int32), num_bins - 1)
        return jnp.zeros(num_bins, jnp.int32).at[bins.reshape(-1)].add(1)

    return {name: count(seen, peaks[name]) for name, seen in inputs_of.items()}


def _tapped(
    block: Block, x: Array, keys: Array, values: Array, inputs: LayerInputs
) -> tuple[Array, dict[str, Array]]:
    """Run a block; gives what it makes, and what its projections were given, in float32."""
    taps = {}
    for name in PROJECTIONS:
        folder, attribute = name.split(".")
        parent = getattr(block, folder)
        taps[name] = _Tap(getattr(parent, attribute))
        setattr(parent, attribute, taps[name])
    hidden = block(x, keys, values, inputs)[0]
    return hidden, {name: tap.seen[0].astype(jnp.float32) for name, tap in taps.items()}


def second_moments(x: Float[Array, "T K"]) -> Float32[Array, "K K"]:
    """x.T @ x in float32."""
    wide = x.astype(jnp.float32)
    return jnp.dot(wide.T, wide, precision=lax.Precision.HIGHEST)
