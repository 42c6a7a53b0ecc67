"""Which code computes an op, and the checks that every implementation shares.

Does not know the ops' arithmetic. Called by the public ops on every trace and once by whoever
builds an engine, so that a bad combination is refused before anything is launched.
"""

from typing import Literal, get_args

from jaxtyping import Array, Float

Implementation = Literal["reference", "xla"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


def choose_implementation(platform: str) -> Implementation:
    """Name the implementation for a platform as `jax.Device.platform` spells it."""
    del platform  # the portable one is the only fast one so far
    return "xla"


def check_supported(
    implementation: Implementation, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Refuse head counts that the implementation cannot compute.

    Raises ValueError for an unknown name or heads that do not divide.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation {implementation!r} is unknown; choose one of {IMPLEMENTATIONS}"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads; "
            "grouped-query attention needs whole groups"
        )
    if head_dim < 1:
        raise ValueError(f"head_dim is {head_dim}; it must be positive")


def check_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    window: int,
    sink_len: int,
    q_sink: Float[Array, "T N H"] | None,
    implementation: Implementation,
) -> None:
    """Refuse options of an attention op that do not fit together, by name."""
    if window < 0 or sink_len < 0:
        raise ValueError(f"window ({window}) and sink_len ({sink_len}) must not be negative")
    if sink_len and not window:
        raise ValueError(f"sink_len is {sink_len} but window is 0; sinks belong to a window")
    if bool(sink_len) != (q_sink is not None):
        raise ValueError(f"q_sink must be given exactly when sink_len ({sink_len}) is positive")
    check_supported(
        implementation,
        num_heads=q.shape[1],
        num_kv_heads=k_pages.shape[1],
        head_dim=q.shape[2],
    )
