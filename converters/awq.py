"""AWQ-style scaling (Lin et al. 2023, arXiv 2306.00978): inputs that matter get finer codes.

An input of a projection is made smaller by a factor and its weights larger, so that their rounding
errors count less. What made the input divides by the factor: the norm in front of qkv and gate_up,
the value heads of qkv for the output projection, the up half of gate_up for down. In all the model
computes what it did before. Called by `calibration.py`.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from swiftjax.converters.grids import Shape, rounded, widest_grid
from swiftjax.model_config import ModelConfig

# Exponents of the importance that are tried; 0 leaves everything as it is.
EXPONENTS = tuple(i / 20 for i in range(20))

Params = dict[str, Array]
Share = Callable[[Float32[Array, " K"]], Float32[Array, " K"]]


def scale_layer(
    params: Params, moments: dict[str, Array], shapes: dict[str, Shape], config: ModelConfig
) -> tuple[Params, dict[str, Array]]:
    """Rescale one layer for the projections that `shapes` names; gives its moments afterwards.

    `params` are dense, with the names inside the layer.
    """
    params, moments = dict(params), dict(moments)
    # The first two change outputs of qkv and gate_up, whose own factors are sought afterwards.
    for name, maker in (("attention.output", "attention.qkv"), ("mlp.down", "mlp.gate_up")):
        if name not in shapes:
            continue
        share = partial(_shared_by_group, config=config) if name == "attention.output" else _own
        factor = best_factor(_rows(params, name), moments[name], shapes[name], share)
        narrow = _of_values(factor, config) if name == "attention.output" else factor
        _scale_inputs(params, moments, name, factor)
        _divide_last_outputs(params, maker, narrow)
    for name, norm in (("attention.qkv", "attention_norm"), ("mlp.gate_up", "mlp_norm")):
        if name in shapes:
            factor = best_factor(_rows(params, name), moments[name], shapes[name], _own)
            factor = _divide_norm(params, f"{norm}.scale", factor)
            _scale_inputs(params, moments, name, factor)
    return params, moments


def best_factor(
    weights: Float32[Array, "N K"], moments: Float32[Array, "K K"], shape: Shape, share: Share
) -> Float32[Array, " K"]:
    """The factors, a power of each input's root mean square, that make the product best.

    `share` makes those equal that must be.
    """
    power = share(jnp.diagonal(moments))
    # An input that is always zero tells nothing: it stays as it is.
    typical = jnp.sqrt(jnp.where(power > 0, power, power.mean() + jnp.float32(1e-30)))
    best, least = jnp.ones_like(typical), jnp.inf
    for exponent in EXPONENTS:
        factor, error = _try(weights, moments, typical, jnp.float32(exponent), shape)
        if float(error) < least:
            best, least = factor, float(error)
    return best


@partial(jax.jit, static_argnums=4)
def _try(
    weights: Float32[Array, "N K"],
    moments: Float32[Array, "K K"],
    typical: Float32[Array, " K"],
    exponent: Float32[Array, ""],
    shape: Shape,
) -> tuple[Array, Array]:
    factor = typical**exponent
    factor = factor / jnp.sqrt(factor.max() * factor.min())
    scaled = weights * factor[None, :]
    wrong = rounded(scaled, widest_grid(scaled, shape), shape) / factor[None, :] - weights
    error = jnp.dot(wrong, moments, precision=lax.Precision.HIGHEST)
    return factor, (error * wrong).sum()


def _own(power: Float32[Array, " K"]) -> Float32[Array, " K"]:
    return power


def _shared_by_group(power: Float32[Array, " K"], config: ModelConfig) -> Float32[Array, " K"]:
    """Query heads of a group read the same value head, which can be divided by one factor only."""
    heads = power.reshape(config.num_kv_heads, -1, config.head_dim)
    return jnp.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)


def _of_values(factor: Float32[Array, " K"], config: ModelConfig) -> Float32[Array, " V"]:
    return factor.reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)


def _rows(params: Params, name: str) -> Float32[Array, "N K"]:
    return params[f"{name}.kernel"].astype(jnp.float32).T


def _scale_inputs(params: Params, moments: Params, name: str, factor: Array) -> None:
    _multiply(params, f"{name}.kernel", factor[:, None])
    moments[name] = moments[name] / (factor[:, None] * factor[None, :])


def _divide_last_outputs(params: Params, name: str, factor: Float32[Array, " V"]) -> None:
    """Divide the last outputs of a projection, and their biases."""
    kernel = params[f"{name}.kernel"]
    whole = jnp.ones(kernel.shape[1], jnp.float32).at[-factor.shape[0] :].set(1 / factor)
    _multiply(params, f"{name}.kernel", whole[None, :])
    if f"{name}.bias" in params:
        _multiply(params, f"{name}.bias", whole)


def _divide_norm(params: Params, name: str, factor: Array) -> Float32[Array, " K"]:
    """Divide a norm's scale; gives the factors that it was divided by after rounding."""
    before = params[name].astype(jnp.float32)
    _multiply(params, name, 1 / factor)
    after = params[name].astype(jnp.float32)
    return jnp.where((before != 0) & (after != 0), before / after, 1.0)


def _multiply(params: Params, name: str, by: Float[Array, "..."]) -> None:
    values = params[name]
    params[name] = (values.astype(jnp.float32) * by).astype(values.dtype)
