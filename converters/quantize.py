"""Quantise the projections of a checkpoint on their way to the device or into a native one.

One matrix at a time, in blocks of outputs on all cores. Decides which parameters change and what
they become; the arithmetic is `round_to_nearest`'s. Called by `load` and through it by `convert`.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from swiftjax.converters.calibration import Recipe, Tensors, calibrated
from swiftjax.converters.round_to_nearest import round_to_nearest
from swiftjax.errors import InvalidRequestError
from swiftjax.model_config import ModelConfig
from swiftjax.quantization import Quantization, WeightFormat

BLOCK_OUTPUTS = 512
KERNEL = ".kernel"
NEAREST = Recipe()


def with_quantization(config: ModelConfig, asked: Quantization | None) -> ModelConfig:
    """The configuration after quantising; raises InvalidRequestError for what is so already."""
    if asked is None or asked == config.quantization:
        return config
    if config.quantization is not None:
        raise InvalidRequestError(
            f"the checkpoint is quantised already ({config.quantization.kind}); asked for "
            f"{asked.kind}: start from the original weights"
        )
    return replace(config, quantization=asked)


def check_untouched(config: ModelConfig, asked: Quantization | None, recipe: Recipe) -> None:
    """Refuse to round by a recipe what is rounded already; raises InvalidRequestError."""
    if asked is not None and recipe != NEAREST:
        raise InvalidRequestError(
            f"the checkpoint is quantised already ({config.quantization}), so its weights cannot "
            f"be rounded by {recipe.method}: start from the original ones"
        )


def quantized(
    tensors: Tensors, config: ModelConfig, recipe: Recipe = NEAREST
) -> Iterator[tuple[str, np.ndarray]]:
    """Replace dense kernels [in, out] by the parameters of their format; pass on all others."""
    if recipe.texts:
        yield from calibrated(tensors, config, recipe)
        return
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for name, given in tensors:
            values = np.asarray(given)
            form = config.weight_format(name.removesuffix(KERNEL))
            if not name.endswith(KERNEL) or form is None:
                yield name, values
                continue
            for suffix, part in quantize_matrix(
                values, form, pool, symmetric=recipe.symmetric
            ).items():
                yield name.removesuffix("kernel") + suffix, part


def quantize_matrix(
    kernel: np.ndarray, form: WeightFormat, pool: ThreadPoolExecutor, *, symmetric: bool = False
) -> dict[str, np.ndarray]:
    """Quantise one dense kernel [in, out]."""

    def block(first: int) -> dict[str, np.ndarray]:
        columns = kernel[:, first : first + BLOCK_OUTPUTS].T
        return round_to_nearest(np.ascontiguousarray(columns, dtype=np.float32), form, symmetric)

    blocks = list(pool.map(block, range(0, kernel.shape[1], BLOCK_OUTPUTS)))
    return {name: _join(name, [part[name] for part in blocks], form) for name in blocks[0]}


def _join(name: str, parts: list[np.ndarray], form: WeightFormat) -> np.ndarray:
    """Outputs stand first, save in the scales and zero points of groups."""
    axis = 1 if form.kind == "int4" and name != "kernel" else 0
    return np.concatenate(parts, axis=axis)
