"""Runs pieces of text through the model, each alone in a small cache of its own.

The forward pass is the engine's (`step_model.py`), as one prefill step per piece; there is no
scheduler and nothing is sampled. For whoever wants the scores of every token: perplexity.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from swiftjax import kernels
from swiftjax.batch import Batch, BatchShape, empty_batch
from swiftjax.config import KVCacheDtype
from swiftjax.errors import InvalidRequestError
from swiftjax.model.kv_cache import KVCache, make_kv_cache
from swiftjax.model.step_model import StepModel
from swiftjax.model_config import ModelConfig

PAGE_SIZE = 64


class TextPass:
    """One model, ready for texts of up to `length` tokens."""

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Array],
        *,
        length: int,
        implementation: kernels.Implementation,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        """Raises InvalidRequestError for texts longer than the model is made for."""
        check_length(config, length)
        self.config, self.length = config, length
        model = StepModel(config, max_model_len=length, implementation=implementation)
        self._params = model.bind(params)
        self._run = jax.jit(partial(_log_probs, model), donate_argnums=1)
        self._cache = make_kv_cache(
            config, num_pages=-(-length // PAGE_SIZE), page_size=PAGE_SIZE, dtype=model.dtype,
            kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip

    def log_probs(self, tokens: Int32[np.ndarray, " T"]) -> Float32[Array, "length V"]:
        """Log-probabilities of what follows each token; rows from T on mean nothing."""
        batch = text_batch(tokens, self.length, PAGE_SIZE)
        scores, self._cache = self._run(self._params, self._cache, batch)
        return scores


def check_length(config: ModelConfig, length: int) -> None:
    """Refuse texts that the model is not made for, and such as score nothing."""
    if not 2 <= length <= config.max_position:
        raise InvalidRequestError(
            f"texts of {length} tokens cannot be scored; choose from 2 to {config.max_position}"
        )


def text_batch(tokens: Int32[np.ndarray, " T"], length: int, page_size: int) -> Batch:
    """A step that computes the tokens as a sequence of their own, padded to `length`."""
    count, num_pages = len(tokens), -(-length // page_size)
    shape = BatchShape(num_tokens=length, num_seqs=1, max_pages=num_pages, long_chunks=True)
    batch = empty_batch(shape, num_slots=num_pages * page_size)
    batch.token_ids[:count] = tokens
    batch.positions[:count] = batch.slot_mapping[:count] = np.arange(count)
    batch.page_table[0] = np.arange(num_pages)
    batch.query_starts[1:] = count
    batch.context_lens[0] = batch.prompt_lens[0] = count
    return batch


def _log_probs(
    model: StepModel, params: tuple[Array, ...], cache: KVCache, batch: Batch
) -> tuple[Array, KVCache]:
    llama, hidden, cache = model.forward(params, cache, batch)
    logits = llama.logits(hidden, model.implementation)
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), cache
