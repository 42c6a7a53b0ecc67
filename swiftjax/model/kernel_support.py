"""Which implementation computes a model's ops: the one asked for, or the platform's own.

Chosen once by whoever runs a model, an engine or a calibration, and logged; no call chooses again.
"""

import logging

import jax

from swiftjax import kernels
from swiftjax.errors import UnsupportedError
from swiftjax.model_config import ModelConfig

logger = logging.getLogger(__name__)


def choose_kernels(
    asked: kernels.Implementation | None, model: ModelConfig, page_size: int
) -> kernels.Implementation:
    """The one asked for, or the platform's own; what that one lacks is computed by "xla"."""
    chosen = asked or kernels.choose_implementation(jax.default_backend())
    try:
        kernels.check_supported(
            chosen,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            page_size=page_size,
            dtype=model.dtype or "float32",
        )
    except NotImplementedError as error:
        if asked is not None:
            raise UnsupportedError(str(error)) from error
        logger.warning("%s", error)
        return "xla"
    return chosen
