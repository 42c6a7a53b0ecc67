"""The model as a pure function of a flat tuple of arrays.

The module structure is split off once and closed over, because calling through `nnx.jit` costs 80
times more per call than a flat tuple of arrays. Used by `programs.py`, and by whoever wants the
forward pass alone.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from swiftjax import kernels
from swiftjax.batch import Batch
from swiftjax.model.kv_cache import KVCache
from swiftjax.model.llama import Llama
from swiftjax.model.params import abstract_model
from swiftjax.model.rope import RopeTable, make_rope_table
from swiftjax.model_config import ModelConfig


class StepModel:
    """The structure of one model, without its weights: those are bound once they are loaded."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_model_len: int,
        implementation: kernels.Implementation,
        row_invariant: bool = False,
    ) -> None:
        self.config = config
        self._max_model_len = max_model_len
        self.dtype = jnp.dtype(config.dtype or "float32")
        self._graphdef, state = nnx.split(abstract_model(config, self.dtype))
        paths = [path for path, _ in nnx.to_flat_state(state)]
        self._names = [".".join(map(str, path)) for path in paths]
        self._table = make_rope_table(config.rope, config.head_dim, max_model_len)
        weights, self._treedef = jax.tree.flatten(state)
        table = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._table if x is not None)
        self.abstract_params: tuple[jax.ShapeDtypeStruct, ...] = (*weights, *table)
        self.implementation: kernels.Implementation = implementation
        self._row_invariant = row_invariant

    def describe(self) -> str:
        """Say all that shapes what is computed, but the arguments."""
        return repr((self.config, self._max_model_len, self.implementation, self._row_invariant))

    def bind(self, params: dict[str, Array]) -> tuple[Array, ...]:
        """The flat tuple that every call is given, of weights by name and the rotary table."""
        assert params.keys() == set(self._names)
        weights = (params[name] for name in self._names)
        return (*weights, *(jnp.asarray(part) for part in self._table if part is not None))

    def forward(
        self, params: tuple[Array, ...], kv_cache: KVCache, batch: Batch
    ) -> tuple[Llama, Array, KVCache]:
        """Run all layers; returns the merged model too, for its head."""
        model, table = self.merge(params)
        hidden, kv_cache = model(
            batch, kv_cache, table, self.implementation, row_invariant=self._row_invariant
        )
        return model, hidden, kv_cache

    def weights(self, params: tuple[Array, ...]) -> tuple[Array, ...]:
        """Those of bound arrays that come from a checkpoint."""
        return params[: len(self._names)]

    def merge(self, params: tuple[Array, ...]) -> tuple[Llama, RopeTable]:
        """The module over these arrays."""
        weights, table = self.weights(params), RopeTable(*params[len(self._names) :])
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, weights)), table
