"""Products of e4m3 tiles by Hopper's own instruction, for kernels in Pallas on Triton.

Pallas asks Triton for sums in full float32, which that instruction does not give, so Triton
converts both tiles to float16 and takes instructions of Ampere's. jax has no public word for the
other choice; this registers a primitive of ours with its lowering. Used by `split_k.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from swiftjax.kernels import _triton

# Inputs that are summed in a tensor core, to 14 bits, before the sum goes on in float32.
INPUTS_PER_SUM = 128


def fp8_product(left: jax.Array, right: jax.Array) -> jax.Array:
    """left [N K] @ right [K M] in float32, inside a kernel."""
    # Ada's instruction for e4m3 is taken in any case.
    if _triton.is_interpreted() or _triton.capability() != _triton.HOPPER:
        return jnp.dot(left, right, preferred_element_type=jnp.float32)
    zeros = jnp.zeros((left.shape[0], right.shape[1]), jnp.float32)
    try:
        primitive = _primitive()
    except (ImportError, AttributeError):  # a jax that keeps these parts elsewhere
        return jnp.dot(left, right, preferred_element_type=jnp.float32)
    return primitive.bind(left, right, zeros)


@functools.cache
def _primitive() -> Primitive:
    """Made when it is first needed: CPUs do without, and what it imports is private to jax."""
    from jax._src.pallas.triton import lowering
    from jaxlib.triton import dialect

    primitive = Primitive("fp8_product")
    primitive.def_abstract_eval(lambda left, right, zeros: zeros)

    @lowering.register_lowering(primitive)
    def lower(_: Any, left: Any, right: Any, zeros: Any) -> Any:
        return dialect.dot(left, right, zeros, max_num_imprecise_acc=INPUTS_PER_SUM)

    return primitive
