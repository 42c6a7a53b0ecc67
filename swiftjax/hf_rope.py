"""Reads rotary position embedding out of a Hugging Face config.json.

The same settings have two spellings there, and most of the ways to get them wrong give a model that
runs and answers nonsense: what is not known is refused by name. Called by `hf_config.py`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.model_config import ROPE_KINDS, RopeConfig, RopeKind

logger = logging.getLogger(__name__)


def read_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """RoPE parameters from `rope_parameters` (new spelling) or `rope_scaling` + `rope_theta`.

    Where a theta stands both at the top level and inside the block, the block wins (with a warning
    if they differ), as the newer spelling is the one a recent tool wrote.
    """
    block = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = _rope_kind(config, block)
    top, inner = config.get("rope_theta"), block.get("rope_theta")
    if top is not None and inner is not None and float(top) != float(inner):
        logger.warning(
            "rope_theta is %s at the top level and %s in rope_parameters; the latter is used",
            top,
            inner,
        )
    theta = float(inner if inner is not None else top if top is not None else 10_000.0)
    original = config.get("original_max_position_embeddings") or block.get(
        "original_max_position_embeddings"
    )
    if kind == "dynamic":  # scales from the model's own limit, whatever else the block says
        original = max_position
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=float(block.get("factor") or 1.0),
        low_freq_factor=float(block.get("low_freq_factor", 1.0)),
        high_freq_factor=float(block.get("high_freq_factor", 4.0)),
        original_max_position=int(original or max_position),
        attention_factor=block.get("attention_factor"),
        beta_fast=float(block.get("beta_fast") or 32.0),
        beta_slow=float(block.get("beta_slow") or 1.0),
        mscale=block.get("mscale"),
        mscale_all_dim=block.get("mscale_all_dim"),
        truncate=bool(block.get("truncate", True)),
    )


def _rope_kind(config: Mapping[str, Any], block: Mapping[str, Any]) -> RopeKind:
    """Check everything in the block that could make the embedding silently wrong."""
    if nested := [key for key, value in block.items() if isinstance(value, Mapping)]:
        raise UnsupportedError(
            f"rope_parameters differ by layer type ({', '.join(nested)}); one set for all is "
            "supported"
        )
    for source in (config, block):
        if (partial := source.get("partial_rotary_factor")) not in (None, 1):
            raise UnsupportedError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    name = block.get("rope_type", block.get("type", "default"))
    kinds: dict[str, RopeKind] = {kind: kind for kind in ROPE_KINDS}
    kind = kinds.get(str(name))
    if kind is None:
        raise UnsupportedError(
            f"rope type {name!r} is not supported; known: {', '.join(ROPE_KINDS)}"
        )
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    for key in needed if kind != "default" else ():
        value = block.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InvalidRequestError(
                f"config.json: rope type {kind!r} needs a positive {key!r}, not {value!r}"
            )
    return kind
