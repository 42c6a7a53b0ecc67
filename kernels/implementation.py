"""Which code computes an op, and the checks that every implementation shares.

Does not know the ops' arithmetic. Called by the public ops on every trace and once by whoever
builds an engine, so that a bad combination is refused before anything is launched.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from swiftjax.kernels import _triton
from swiftjax.kernels.quantized_pages import Pages, computed_dtype
from swiftjax.kernels.streams import Streams

# mosaic: as triton, but kernels for Hopper GPUs attend over the long prompt chunks that they know,
# and compute products of many tokens
# invariant: as mosaic, but the bits of a row depend on nothing else in the batch, nor on its size;
# where `knows_invariant`, and in attention for those who ask it to be `row_invariant`
Implementation = Literal["reference", "xla", "triton", "mosaic", "invariant"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)[:4]  # that users may choose

TRITON_DTYPES = ("bfloat16", "float16", "float32")
TRITON_HEAD_DIMS = (16, 256)
TRITON_PAGE_SIZES = (16, 32, 64, 128)
TRITON_MAX_GROUP = 16


def choose_implementation(platform: str) -> Implementation:
    """Name the fastest for a platform as `jax.Device.platform` spells it."""
    if platform not in ("gpu", "cuda"):
        return "xla"
    return "mosaic" if _triton.capability() == _triton.HOPPER else "triton"


def runs_triton(implementation: Implementation) -> bool:
    """Whether everything but what Mosaic computes is a Triton kernel's work."""
    return implementation in ("triton", "mosaic", "invariant")


def check_supported(
    implementation: Implementation,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: DTypeLike,
) -> None:
    """Refuse a model's numbers that the implementation cannot compute.

    Raises ValueError for what no implementation can do, NotImplementedError for what this one
    lacks.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads; "
            "grouped-query attention needs whole groups"
        )
    if not runs_triton(implementation):
        return
    name = jnp.dtype(dtype).name
    low, high = TRITON_HEAD_DIMS
    refusals = {
        f"dtype {name} (it computes {', '.join(TRITON_DTYPES)})": name not in TRITON_DTYPES,
        f"head_dim {head_dim} (it computes {low} to {high})": not low <= head_dim <= high,
        f"page_size {page_size} (it knows {TRITON_PAGE_SIZES})": page_size not in TRITON_PAGE_SIZES,
        f"{num_heads // num_kv_heads} query heads per KV head (at most {TRITON_MAX_GROUP})": (
            num_heads // num_kv_heads > TRITON_MAX_GROUP
        ),
    }
    for refusal, applies in refusals.items():
        if applies:
            raise NotImplementedError(
                f"the '{implementation}' implementation lacks {refusal}; use implementation='xla'"
            )
    if implementation == "mosaic" and (found := _triton.capability()) != _triton.HOPPER:
        raise NotImplementedError(
            f"the 'mosaic' implementation lacks GPUs of compute capability {found[0]}.{found[1]} "
            f"(it is for {_triton.HOPPER[0]}.{_triton.HOPPER[1]}); "
            "use implementation='triton'"
        )


def check_attention(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    window: int,
    streams: Streams | None,
    implementation: Implementation,
) -> None:
    """Refuse options of an attention op that do not fit together, by name."""
    if window < 0:
        raise ValueError(f"window is {window}; it must not be negative")
    if window and streams is not None:
        raise ValueError(f"window is {window}, and streams have their own; give one of the two")
    if streams is not None and streams.q_sink.shape != q.shape:
        raise ValueError(f"q_sink is {streams.q_sink.shape}; it must be like q, {q.shape}")
    check_supported(
        implementation,
        num_heads=q.shape[1],
        num_kv_heads=k_pages.shape[1],
        head_dim=q.shape[2],
        page_size=k_pages.shape[2],
        dtype=computed_dtype(k_pages, q),
    )
