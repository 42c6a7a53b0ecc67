"""Names and shapes of a model's weights, and random ones for tests and speed measurements.

Knows the modules only as a tree of parameters. Used by the readers of checkpoints, which check
what they find against it, and by `converters/dummy.py`.
"""

import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from swiftjax.model.llama import Llama
from swiftjax.model_config import ModelConfig

# Standard deviations of evenly distributed codes: -127..127, 0..15, and a normal one of e4m3.
CODE_SPREAD = {"int8": 73.3, "int32": 4.61, "float8_e4m3fn": 1.0}
MIDDLE_CODE = 8
INPUT_SCALE = 4 / 127  # of inputs with a standard deviation of one


def abstract_params(config: ModelConfig, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Names, shapes and dtypes of all weights, without allocating any."""
    named = _named(abstract_model(config, dtype))
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in named.items()}


@functools.lru_cache(maxsize=4)
def abstract_model(config: ModelConfig, dtype: jnp.dtype) -> Llama:
    """The modules without their arrays; not to be changed.

    Made once, because 32 layers take half a second and a start asks five times.
    """
    return nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights, in the model's dtype and quantisation."""
    params = abstract_params(config, jnp.dtype(config.dtype or "float32"))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in params.values())


def random_params(config: ModelConfig, dtype: jnp.dtype, seed: int = 0) -> dict[str, Array]:
    """Random weights on the default device: for tests and for speed measurements.

    Quantised ones have random codes and scales that give the same spread as dense ones have.
    """
    abstract = abstract_params(config, dtype)
    key = jax.random.key(seed)
    # The first array of each kind compiles a program: kinds are made side by side, the arrays of a
    # kind one after the other, so that nothing is compiled twice.
    kinds: dict[tuple[Any, ...], list[tuple[np.uint32, str]]] = {}
    for i, (name, like) in enumerate(abstract.items()):
        kind = (like.shape, like.dtype, name.rpartition(".")[2])
        kinds.setdefault(kind, []).append((np.uint32(i), name))

    def make(named: list[tuple[np.uint32, str]]) -> list[tuple[str, Array]]:
        return [(name, _random_param(abstract, name, key, number, dtype)) for number, name in named]

    with ThreadPoolExecutor() as pool:
        made = dict(itertools.chain.from_iterable(pool.map(make, kinds.values())))
    return {name: made[name] for name in abstract}


def _random_param(
    abstract: dict[str, jax.ShapeDtypeStruct],
    name: str,
    key: Array,
    number: np.uint32,
    dtype: jnp.dtype,
) -> Array:
    like = abstract[name]
    if name.endswith(".kernel_scale"):
        kernel = abstract[name.removesuffix("_scale")]
        nibbles = 8 if kernel.dtype == jnp.int32 else 1
        spread = CODE_SPREAD[kernel.dtype.name] * (kernel.shape[1] * nibbles) ** 0.5
        return jnp.full(like.shape, 1 / spread, like.dtype)
    if name.endswith(".kernel_zero"):
        return jnp.full(like.shape, MIDDLE_CODE, like.dtype)
    if name.endswith(".kernel_input_scale"):
        return jnp.full(like.shape, INPUT_SCALE, like.dtype)
    if name.endswith(".kernel_order"):
        order = jnp.arange(like.shape[0], dtype=like.dtype)
        return jax.random.permutation(jax.random.fold_in(key, number), order)
    if like.dtype in (jnp.int8, jnp.int32):
        return _codes(key, number, like.shape, like.dtype)
    is_fp8 = like.dtype == jnp.float8_e4m3fn
    fan_in = like.shape[-1] if name == "embed.embedding" else like.shape[0]
    scale = jnp.float32(1.0 if is_fp8 else fan_in**-0.5)
    values = _normal(key, number, like.shape, scale, like.dtype)
    return values + jnp.ones((), dtype) if name.endswith(".scale") else values


# One small program per shape, and one call per array.
@functools.partial(jax.jit, static_argnums=(2, 4))
def _normal(
    key: Array, number: Array, shape: tuple[int, ...], scale: Array, dtype: jnp.dtype
) -> Array:
    key = jax.random.fold_in(key, number)
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _codes(key: Array, number: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    key = jax.random.fold_in(key, number)
    if dtype == jnp.int8:
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    return jax.random.bits(key, shape, jnp.uint32).view(jnp.int32)


def _named(model: Llama) -> dict[str, Any]:
    # arrays, or their shapes where the model is abstract
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}
