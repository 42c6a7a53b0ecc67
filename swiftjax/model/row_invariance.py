"""Whether a model's rows can be computed so that their bits depend on nothing else in a batch.

Called where an engine is built: deterministic mode then has several sizes of steps, else one.
"""

import jax.numpy as jnp

from swiftjax import kernels
from swiftjax.model_config import ModelConfig


def knows_invariant_rows(config: ModelConfig, implementation: kernels.Implementation) -> bool:
    """Whether "invariant" kernels compute all of this model, where `implementation` would."""
    if implementation != "mosaic" or config.quantization is not None:
        return False
    width = config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    hidden, mlp, dtype = config.hidden_size, config.intermediate_size, config.dtype or "float32"
    products = (hidden, qkv), (width, hidden), (mlp, hidden), (hidden, config.vocab_size)
    known = jnp.dtype(dtype)
    gates = kernels.knows_invariant(hidden, 2 * mlp, known, gated=True)
    return gates and all(kernels.knows_invariant(*shape, known) for shape in products)
