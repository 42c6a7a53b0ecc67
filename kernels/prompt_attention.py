"""Attention of one whole fresh prompt, where a library's kernel is faster than a paged one.

Another implementation of ragged attention for the one batch in which paging has nothing to give:
keys and values are copied out of the pages side by side, which costs 2 % of the time, and cuDNN
attends over them. On other devices jax's portable twin of the same mathematics takes its place.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import _triton
from swiftjax.kernels.quantized_pages import Pages, QuantizedPages

DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 128


def check_prompt_attention(
    *, head_dim: int, dtype: DTypeLike, window: int, has_streams: bool, is_quantized: bool
) -> None:
    """Raise NotImplementedError, by name, for what a paged kernel must compute."""
    name = jnp.dtype(dtype).name
    refusals: Mapping[str, bool] = {
        f"dtype {name} (it computes {' and '.join(DTYPES)})": name not in DTYPES,
        f"head_dim {head_dim} (a multiple of 8 up to {MAX_HEAD_DIM})": (
            head_dim > MAX_HEAD_DIM or head_dim % 8 != 0
        ),
        f"a window of {window} tokens": window > 0,
        "windows and sinks of single sequences": has_streams,
        "pages in 8 bits": is_quantized,
    }
    for refusal, applies in refusals.items():
        if applies:
            raise NotImplementedError(
                f"attention of whole prompts by cuDNN lacks {refusal}; leave it to the paged kernel"
            )


def prompt_attention(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B M"],
    context_lens: Int32[Array, " B"],
    *,
    scale: float,
) -> Float[Array, "T N H"]:
    """Attend causally over the first sequence, whose tokens are all new; the others have none.

    Rows past its context are padding and give zeros.
    """
    assert not isinstance(k_pages, QuantizedPages) and not isinstance(v_pages, QuantizedPages)
    length = context_lens[:1]
    # A CPU has no products of 16-bit floats.
    dtype = jnp.dtype(jnp.float32) if _triton.is_interpreted() else q.dtype
    keys, values = (
        _side_by_side(pages, page_table[0], length, q.shape[0]) for pages in (k_pages, v_pages)
    )
    # jax's function promotes types and ranks itself, which whoever calls us may have forbidden.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out = jax.nn.dot_product_attention(
            *(x.astype(dtype)[None] for x in (q, keys, values)),
            scale=scale,
            is_causal=True,
            query_seq_lengths=length,
            key_value_seq_lengths=length,
            implementation="xla" if _triton.is_interpreted() else "cudnn",
        )
    return out[0].astype(q.dtype)


def _side_by_side(
    pages: Float[Array, "P K S H"],
    page_ids: Int32[Array, " M"],
    length: Int32[Array, " 1"],
    num_tokens: int,
) -> Float[Array, "T K H"]:
    """The tokens of one sequence in order; those past its length are zeros.

    A slot past the length may hold NaN, and a weight of zero would not silence that.
    """
    _, num_kv_heads, page_size, head_dim = pages.shape
    column = jnp.arange(-(-num_tokens // page_size), dtype=jnp.int32)
    # A table of shorter contexts than the padded step: what it lacks is padding.
    tokens = pages[page_ids.at[column].get(mode="clip")].transpose(0, 2, 1, 3)
    tokens = tokens.reshape(-1, num_kv_heads, head_dim)[:num_tokens]
    is_there = jnp.arange(num_tokens, dtype=jnp.int32) < length
    return jnp.where(is_there[:, None, None], tokens, jnp.zeros((), tokens.dtype))
