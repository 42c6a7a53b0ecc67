"""Which implementation computes the ops of `kernels/`: the one asked for, or the platform's own.

Chosen once per engine and logged; no call chooses again. Called by `build.py`, and by whatever else
runs a model.
"""

import logging

import jax

from swiftjax import kernels
from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.model_config import ModelConfig

logger = logging.getLogger(__name__)


def read_implementation(name: str | None) -> kernels.Implementation | None:
    """Refuse an unknown name before the weights are read, which may take minutes."""
    if name is None:
        return None
    for known in kernels.IMPLEMENTATIONS:
        if known == name:
            return known
    raise InvalidRequestError(
        f"implementation {name!r} is unknown; choose one of {', '.join(kernels.IMPLEMENTATIONS)}"
    )


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
