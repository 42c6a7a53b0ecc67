"""Loads a model for scoring texts: weights, tokenizer and the compiled pass, without an engine."""

from collections.abc import Callable
from typing import NamedTuple

from swiftjax.config import KVCacheDtype
from swiftjax.converters.demo_model import resolve_model
from swiftjax.converters.load import load_params, open_checkpoint
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.kernel_choice import read_implementation
from swiftjax.model.kernel_support import choose_kernels
from swiftjax.model.text_pass import PAGE_SIZE, TextPass, check_length
from swiftjax.model_config import Dtype
from swiftjax.quantization import Quantization
from swiftjax.sizing import check_kv_cache_dtype, configure_jax

MEMORY_FRACTION = 0.9


class ScoredModel(NamedTuple):
    """A model that gives log-probabilities, and its tokenizer."""

    model: TextPass
    tokenizer: Tokenizer


def load_scored(
    name: str,
    *,
    dtype: Dtype | None,
    quantization: Quantization | None,
    length: int,
    implementation: str | None,
    kv_cache_dtype: KVCacheDtype = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> ScoredModel:
    """Load a model by path or known name; errors as in `load_checkpoint`.

    Raises InvalidRequestError, before weights are read, for pieces longer than its context.
    """
    configure_jax(MEMORY_FRACTION)
    check_kv_cache_dtype(kv_cache_dtype)
    opened = open_checkpoint(resolve_model(name), dtype=dtype, quantization=quantization)
    check_length(opened.config, length)
    chosen = choose_kernels(read_implementation(implementation), opened.config, PAGE_SIZE)
    params = load_params(opened, progress)
    scored = TextPass(
        opened.config, params, length=length, implementation=chosen, kv_cache_dtype=kv_cache_dtype
    )
    return ScoredModel(
        scored,
        Tokenizer(opened.tokenizer_files, max_chars=1 << 26),
    )
