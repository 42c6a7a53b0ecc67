"""Writes the keys and values of new tokens into their pages, in place when the pages are donated.

Called by the model once per layer, before that layer's attention. The op's meaning is
`reference.write_kv`.
"""

import jax
from jaxtyping import Array, Float, Int32

from swiftjax.kernels import reference
from swiftjax.kernels.implementation import Implementation, check_supported, choose_implementation


def write_kv(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, " T"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Store token t at slot `slot_mapping[t]` = page * S + offset; drop a slot of P * S.

    No two tokens may name the same slot. The caller donates the pages and rebinds both results;
    without donation the whole pool is copied.
    """
    implementation = implementation or choose_implementation(jax.default_backend())
    check_supported(
        implementation,
        num_heads=k.shape[1],
        num_kv_heads=k_pages.shape[1],
        head_dim=k.shape[2],
    )
    return reference.write_kv(k_pages, v_pages, k, v, slot_mapping)
