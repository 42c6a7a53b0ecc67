"""Which implementation computes the ops of `kernels/`: the one asked for, or the platform's own.

Chosen once per engine and logged; no call chooses again. Called by `build.py`, and by whatever else
runs a model.
"""

import logging

import jax

from swiftjax import kernels
from swiftjax.config import EngineConfig
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


def check_prompt_attention(
    config: EngineConfig, model: ModelConfig, implementation: kernels.Implementation
) -> None:
    """Refuse cuDNN for prompts where it can't compute what the model or the engine needs."""
    if config.prompt_attention == "paged":
        return
    if config.deterministic:
        raise InvalidRequestError(
            "deterministic and prompt_attention cudnn are both set: a prompt's bits would depend "
            "on whether it is alone, so leave one of the two out"
        )
    if implementation in ("reference", "xla"):
        raise UnsupportedError(
            f"prompt_attention cudnn goes with the kernels of a GPU, and this engine has "
            f"{implementation!r}: leave it out"
        )
    try:
        kernels.check_prompt_attention(
            head_dim=model.head_dim,
            dtype=model.dtype or "float32",
            window=max(model.layer_windows, default=0),
            has_streams=config.streaming,
            is_quantized=config.kv_cache_dtype != "auto",
        )
    except NotImplementedError as error:
        raise UnsupportedError(f"{error}: prompt_attention paged") from error
