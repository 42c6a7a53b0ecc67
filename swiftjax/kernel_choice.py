"""What users may ask of the kernels: names of implementations, cuDNN for prompts.

Which one computes is `model/kernel_support.py`'s. Called by `build.py`, and by whatever else runs a
model.
"""

from swiftjax import kernels
from swiftjax.config import EngineConfig
from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.model_config import ModelConfig


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
