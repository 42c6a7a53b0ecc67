"""Runs steps: owns the weights, the donated KV cache and one compiled program per batch shape.

A step is a pure function of (params, kv_cache, packed batch). The module structure is split off
once and closed over, because calling through `nnx.jit` costs 80 times more per call than a flat
tuple of arrays. Knows nothing of requests; called by the engine core through `dispatch`.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int

from swiftjax import kernels
from swiftjax.batch import Batch, BatchShape, PageMoves, Sampled, empty_batch
from swiftjax.config import ModelConfig
from swiftjax.model.kv_cache import KVCache, make_kv_cache
from swiftjax.model.kv_swap import KVSwap
from swiftjax.model.llama import Llama
from swiftjax.model.packing import pack, packed_size, unpack
from swiftjax.model.rope import RopeTable, make_rope_table
from swiftjax.model.sampling import sample

NO_MOVES = PageMoves()


class DeviceTokens:
    """The sampled rows of a step that may still be running."""

    def __init__(self, packed: Int[Array, "2 R"]) -> None:
        self._packed = packed
        packed.copy_to_host_async()

    def wait(self, num_rows: int) -> Sampled:
        """Block until the step is done; the first `num_rows` rows."""
        host = np.asarray(self._packed)[:, :num_rows]
        return Sampled(host[0].tolist(), host[1].view(np.float32).tolist())


class StepModel:
    """The model as a pure function of a flat tuple of arrays."""

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Array],
        *,
        max_model_len: int,
        implementation: kernels.Implementation,
    ) -> None:
        dtype = jnp.dtype(config.dtype or "float32")
        model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
        self._graphdef, state = nnx.split(model)
        paths = [path for path, _ in nnx.to_flat_state(state)]
        names = [".".join(map(str, path)) for path in paths]
        table = make_rope_table(config.rope, config.head_dim, max_model_len)
        leaves, self._treedef = jax.tree.flatten(state)
        assert len(leaves) == len(names) == len(params)
        self.params: tuple[Array, ...] = (
            *(params[name] for name in names),
            *map(jnp.asarray, table),
        )
        self._num_weights = len(names)
        self._implementation: kernels.Implementation = implementation

    def forward(
        self, params: tuple[Array, ...], kv_cache: KVCache, batch: Batch
    ) -> tuple[Llama, Array, KVCache]:
        """Run all layers; returns the merged model too, for its head."""
        weights, table = params[: self._num_weights], RopeTable(*params[self._num_weights :])
        model = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, weights))
        hidden, kv_cache = model(batch, kv_cache, table, self._implementation)
        return model, hidden, kv_cache


class ModelRunner:
    """Compiles, warms up and dispatches steps."""

    def __init__(self, model: StepModel, kv_cache: KVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._compiled: dict[BatchShape, jax.stages.Compiled] = {}
        self._swap: KVSwap | None = None
        pages = kv_cache.keys[0]
        self._num_slots = pages.shape[0] * pages.shape[2]

    @property
    def num_compiles(self) -> int:
        """Programs compiled so far; constant once warm."""
        return len(self._compiled)

    def warm_up(
        self, shapes: Iterable[BatchShape], progress: Callable[[int, int], None] | None = None
    ) -> float:
        """Compile every shape ahead of time, in threads; returns the seconds it took.

        `progress` is called with (done, total) after each.
        """
        start, todo = time.monotonic(), list(shapes)
        with ThreadPoolExecutor(max_workers=4) as pool:
            for done, _ in enumerate(pool.map(self._compile, todo), start=1):
                if progress is not None:
                    progress(done, len(todo))
        return time.monotonic() - start

    def measure(self, shape: BatchShape) -> tuple[float, float]:
        """Seconds to move one page one way, and to compute one prompt token in a full step.

        The step runs on padding, so attention over a context is left out.
        """
        batch = empty_batch(shape, self._num_slots)
        self.dispatch(batch).wait(0)
        start = time.monotonic()
        self.dispatch(batch).wait(0)
        per_token = (time.monotonic() - start) / shape.num_tokens
        return self._swapper().seconds_per_page(self._kv_cache), per_token

    def dispatch(self, batch: Batch, moves: PageMoves = NO_MOVES) -> DeviceTokens:
        """Move pages and start one step, without waiting for either.

        Compiles what has not been compiled yet.
        """
        if moves != NO_MOVES:
            self._kv_cache = self._swapper().apply(self._kv_cache, moves)
        shape = BatchShape(
            num_tokens=len(batch.token_ids),
            num_seqs=len(batch.context_lens),
            max_pages=batch.page_table.shape[1],
        )
        step = self._compiled.get(shape) or self._compile(shape)
        sampled, self._kv_cache = step(self._model.params, self._kv_cache, pack(batch))
        return DeviceTokens(sampled)

    def _swapper(self) -> KVSwap:
        if self._swap is None:
            self._swap = KVSwap(self._kv_cache)
        return self._swap

    def _compile(self, shape: BatchShape) -> jax.stages.Compiled:
        lowered = self.lower(shape)
        self._compiled[shape] = compiled = lowered.compile()
        return compiled

    def lower(self, shape: BatchShape) -> jax.stages.Lowered:
        """The step of one shape, traced but not compiled: what `plan` and the tests look into."""

        def step(
            params: tuple[Array, ...], kv_cache: KVCache, packed: Int[Array, " words"]
        ) -> tuple[Int[Array, "2 R"], KVCache]:
            batch = unpack(packed, shape)
            model, hidden, kv_cache = self._model.forward(params, kv_cache, batch)
            logits = model.logits(hidden[batch.sample_rows])
            with jax.named_scope("sample"):
                token_ids, logprobs = sample(logits, batch.sampling)
            bits = lax.bitcast_convert_type(logprobs, jnp.int32)
            return jnp.stack([token_ids, bits]), kv_cache

        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
        return jax.jit(step, donate_argnums=1).lower(self._model.params, self._kv_cache, packed)


def make_runner(
    config: ModelConfig,
    params: dict[str, Array],
    *,
    num_pages: int,
    page_size: int,
    max_model_len: int,
    implementation: kernels.Implementation,
) -> ModelRunner:
    """Assemble a runner with a fresh KV cache in the model's dtype."""
    model = StepModel(config, params, max_model_len=max_model_len, implementation=implementation)
    dtype = jnp.dtype(config.dtype or "float32")
    cache = make_kv_cache(config, num_pages=num_pages, page_size=page_size, dtype=dtype)
    return ModelRunner(model, cache)
