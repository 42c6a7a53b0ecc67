"""Runs steps: owns the weights, the donated KV cache and one compiled program per batch shape.

A step is a pure function of (params, kv_cache, token counts, packed batch, edits). The module
structure is split off once and closed over, because calling through `nnx.jit` costs 80 times more
per call than a flat tuple of arrays. Knows nothing of requests; called by the engine core.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, UInt16

from swiftjax import kernels
from swiftjax.batch import (
    Batch,
    BatchShape,
    PageMoves,
    TokenEdits,
    empty_batch,
    empty_edits,
)
from swiftjax.config import ModelConfig
from swiftjax.model.kv_cache import KVCache, make_kv_cache
from swiftjax.model.kv_swap import KVSwap
from swiftjax.model.llama import Llama
from swiftjax.model.logprobs import score_prompt
from swiftjax.model.packing import pack, packed_size, unpack
from swiftjax.model.penalties import Counts, count_sampled, empty_counts
from swiftjax.model.rope import RopeTable, make_rope_table
from swiftjax.model.sampling import sample
from swiftjax.model.step_results import DeviceTokens, StepResult, as_bits

NO_MOVES = PageMoves()


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

    def __init__(self, model: StepModel, kv_cache: KVCache, counts: Counts) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._counts = counts
        self._compiled: dict[BatchShape, jax.stages.Compiled] = {}
        self._swap: KVSwap | None = None
        pages = kv_cache.keys[0]
        self._num_slots = pages.shape[0] * pages.shape[2]
        self._no_edits: dict[int, TokenEdits] = {}  # on the device, by number of rows
        set_row = jax.jit(lambda counts, row, values: counts.at[row].set(values), donate_argnums=0)
        values = jax.ShapeDtypeStruct(counts.shape[1:], counts.dtype)
        row = jax.ShapeDtypeStruct((), jnp.int32)
        self._set_counts = set_row.lower(counts, row, values).compile()

    @property
    def num_compiles(self) -> int:
        """Programs compiled so far; constant once warm."""
        return len(self._compiled)

    def warm_up(
        self, shapes: Iterable[BatchShape], progress: Callable[[int, int], None] | None = None
    ) -> float:
        """Compile every shape and the page moves, in threads; returns the seconds it took.

        `progress` is called with (done, total) after each.
        """
        start, todo = time.monotonic(), list(shapes)
        self._swapper()
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
        edits = self._no_edits[shape.num_seqs] if batch.edits is None else batch.edits
        result, self._kv_cache, self._counts = step(
            self._model.params, self._kv_cache, self._counts, pack(batch), edits
        )
        return DeviceTokens(result, batch)

    def load_counts(self, row: int, counts: UInt16[np.ndarray, " V"]) -> None:
        """Replace one row of the token counts before the next step."""
        self._counts = self._set_counts(self._counts, np.int32(row), counts)

    def _swapper(self) -> KVSwap:
        if self._swap is None:
            self._swap = KVSwap(self._kv_cache)
        return self._swap

    def _compile(self, shape: BatchShape) -> jax.stages.Compiled:
        lowered = self.lower(shape)
        if shape.num_seqs not in self._no_edits:
            self._no_edits[shape.num_seqs] = jax.device_put(empty_edits(shape.num_seqs))
        self._compiled[shape] = compiled = lowered.compile()
        return compiled

    def lower(self, shape: BatchShape) -> jax.stages.Lowered:
        """The step of one shape, traced but not compiled: what `plan` and the tests look into."""

        scores_prompt = shape.num_tokens > shape.num_seqs

        def step(
            params: tuple[Array, ...],
            kv_cache: KVCache,
            counts: Counts,
            packed: Int[Array, " words"],
            edits: TokenEdits,
        ) -> tuple[StepResult, KVCache, Counts]:
            batch = unpack(packed, shape)
            model, hidden, kv_cache = self._model.forward(params, kv_cache, batch)
            logits = model.logits(hidden[batch.sample_rows])
            with jax.named_scope("sample"):
                token_ids, scores = sample(logits, batch.sampling, edits, counts)
                counts = count_sampled(counts, batch.sampling.count_rows, token_ids)
            logprobs, *top = as_bits(scores)
            prompt = None
            if scores_prompt:
                with jax.named_scope("score_prompt"):
                    scores = score_prompt(model.logits, hidden, batch.target_ids)
                logprob, *alternatives = as_bits(scores)
                prompt = jnp.concatenate([logprob[:, None], *alternatives], axis=1)
            tokens = jnp.stack([token_ids, logprobs])
            result = StepResult(tokens, jnp.concatenate(top, axis=1), prompt)
            return result, kv_cache, counts

        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
        edits = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, empty_edits(shape.num_seqs)))
        args = (self._model.params, self._kv_cache, self._counts, packed, edits)
        return jax.jit(step, donate_argnums=(1, 2)).lower(*args)


def make_runner(
    config: ModelConfig,
    params: dict[str, Array],
    *,
    max_num_seqs: int,
    num_pages: int,
    page_size: int,
    max_model_len: int,
    implementation: kernels.Implementation,
) -> ModelRunner:
    """Assemble a runner with a fresh KV cache in the model's dtype, for rows < max_num_seqs."""
    model = StepModel(config, params, max_model_len=max_model_len, implementation=implementation)
    dtype = jnp.dtype(config.dtype or "float32")
    cache = make_kv_cache(config, num_pages=num_pages, page_size=page_size, dtype=dtype)
    return ModelRunner(model, cache, empty_counts(max_num_seqs, config.vocab_size))
